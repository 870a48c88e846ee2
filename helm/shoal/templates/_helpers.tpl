{{/* KubeRay makes longer names of it, so it may have 41 characters; it begins with a letter, as a Service's must. */}}
{{- define "shoal.name" -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- ternary $release (printf "shoal-%s" $release) (hasPrefix "shoal" $release) | trunc 41 | trimSuffix "-" -}}
{{- end }}

{{/* Of pods: without versions, for KubeRay builds a new cluster whenever a pod's template changes. */}}
{{- define "shoal.podLabels" -}}
app.kubernetes.io/name: shoal
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "shoal.labels" -}}
{{ include "shoal.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "shoal.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.device) }}
{{- end }}

{{- define "shoal.claim" -}}
{{ .Values.cache.existingClaim | default (ternary (printf "%s-cache" (include "shoal.name" .)) "" .Values.cache.create) }}
{{- end }}

{{/* GPUs of a worker pod. A stage's ranks talk at every layer: they stay in one pod. */}}
{{- define "shoal.gpus" -}}
{{- if eq .Values.device "cpu" -}}
{{- if .Values.workers.gpusPerWorker }}{{ fail "workers.gpusPerWorker is for device cuda" }}{{ end -}}
0
{{- else -}}
{{- $gpus := int (.Values.workers.gpusPerWorker | default .Values.tp) -}}
{{- if lt $gpus (int .Values.tp) -}}
{{- fail (printf "workers.gpusPerWorker is %d, but the %d ranks of a stage (tp) must fit into one worker" $gpus (int .Values.tp)) -}}
{{- end -}}
{{ $gpus }}
{{- end -}}
{{- end }}

{{/* Workers that all replicas need together: as many stages in each as its GPUs hold; on CPUs one replica in each. */}}
{{- define "shoal.workersNeeded" -}}
{{- if eq .Values.device "cpu" -}}
{{ .Values.replicas }}
{{- else -}}
{{- $stages := mul .Values.replicas .Values.pp -}}
{{- $each := div (int (include "shoal.gpus" .)) .Values.tp -}}
{{ div (sub (add $stages $each) 1) $each }}
{{- end -}}
{{- end }}

{{- define "shoal.workers" -}}
{{- .Values.workers.count | default (include "shoal.workersNeeded" .) -}}
{{- end }}

{{- define "shoal.maxWorkers" -}}
{{- $most := include "shoal.workers" . | int -}}
{{- if .Values.autoscaling.enabled -}}
{{- $most = int (.Values.autoscaling.maxWorkers | default $most) -}}
{{- if gt (int .Values.autoscaling.minWorkers) $most -}}
{{- fail (printf "autoscaling.minWorkers is %d, more than the %d workers at most" (int .Values.autoscaling.minWorkers) $most) -}}
{{- end -}}
{{- end -}}
{{- $needed := include "shoal.workersNeeded" . | int -}}
{{- if and (eq .Values.device "cuda") (lt $most $needed) -}}
{{- fail (printf "%d workers at most, but %d replicas of tp %d × pp %d need %d with %s GPUs each" $most (int .Values.replicas) (int .Values.tp) (int .Values.pp) $needed (include "shoal.gpus" .)) -}}
{{- end -}}
{{ $most }}
{{- end }}

{{- define "shoal.routers" -}}
{{- .Values.routers | default (div (add .Values.replicas 1) 2) -}}
{{- end }}

{{/* CPUs of a worker as KubeRay tells Ray: whole ones, of the limit or else of the request. Empty where neither says. */}}
{{- define "shoal.cpus" -}}
{{- $limits := .Values.workers.resources.limits | default dict -}}
{{- $requests := .Values.workers.resources.requests | default dict -}}
{{- $quantity := $limits.cpu | default $requests.cpu | toString -}}
{{- if regexMatch "^[0-9.]+m$" $quantity -}}
{{ divf (trimSuffix "m" $quantity | float64) 1000 | ceil | int }}
{{- else if regexMatch "^[0-9.]+$" $quantity -}}
{{ $quantity | float64 | ceil | int }}
{{- end -}}
{{- end }}

{{/* Refuses what Ray could never place: on workers with too few CPUs every actor would wait without a message. */}}
{{- define "shoal.checkCpus" -}}
{{- with include "shoal.cpus" . -}}
{{- $cpus := . | float64 -}}
{{- with $ -}}
{{- $rank := .Values.config.cpus_per_rank | default 1 | float64 -}}
{{- $router := .Values.config.cpus_per_router | default 1 | float64 -}}
{{- $stage := mulf .Values.tp $rank -}}
{{- $most := include "shoal.maxWorkers" . | int -}}
{{- $routers := include "shoal.routers" . | int -}}
{{- if gt $stage $cpus -}}
{{- fail (printf "workers.resources: a worker has %v CPUs, and the ranks of a stage, which share one, need tp %d × cpus_per_rank %v = %v" $cpus (int .Values.tp) $rank $stage) -}}
{{- end -}}
{{- if gt $router $cpus -}}
{{- fail (printf "workers.resources: a worker has %v CPUs, and a router needs cpus_per_router %v" $cpus $router) -}}
{{- end -}}
{{- $each := divf $cpus $stage | floor | int -}}
{{- if eq .Values.device "cuda" -}}
{{- $each = min $each (div (include "shoal.gpus" . | int) .Values.tp) | int -}}
{{- end -}}
{{- $stages := mul .Values.replicas .Values.pp | int -}}
{{- if gt $stages (mul $most $each | int) -}}
{{- fail (printf "workers.resources: %d workers of %v CPUs have room for %d stages of %v CPUs, and %d replicas of pp %d have %d" $most $cpus (mul $most $each) $stage (int .Values.replicas) (int .Values.pp) $stages) -}}
{{- end -}}
{{- $needed := addf (mulf $stages $stage) (mulf .Values.replicas 0.01) (mulf $routers $router) -}}
{{- if gt $needed (mulf $most $cpus) -}}
{{- fail (printf "workers.resources: %d workers of %v CPUs have %v together, and %d replicas of %d × %v and a control actor (0.01) and %d routers of %v need %v" $most $cpus (mulf $most $cpus) (int .Values.replicas) (int .Values.pp) $stage $routers $router $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What Serve runs: the same application and the same keys as a configuration file for `shoal serve`. */}}
{{- define "shoal.serveConfig" -}}
{{- $args := deepCopy .Values.config -}}
{{/* Helm reads every number as a float, and would write 8388608 as 8.388608e+06. */}}
{{- range $key, $value := $args -}}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) -}}
{{- $_ := set $args $key (int64 $value) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "model" "device" "tp" "pp" -}}
{{- $_ := set $args $key (index $.Values $key) -}}
{{- end -}}
{{- if .Values.apiKey.existingSecret -}}
{{- $_ := set $args "api_key_file" "/etc/shoal/api-keys" -}}
{{- end -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: shoal
    import_path: cluster.app:build
    route_prefix: /
    args:
      {{- toYaml $args | nindent 6 }}
    # Not among the arguments: Serve restarts everything when one of the arguments changes.
    deployments:
      - name: Replica
        num_replicas: {{ .Values.replicas }}
      - name: Router
        num_replicas: {{ include "shoal.routers" . }}
{{- end }}

{{/* A pod of the Ray cluster. Takes a dict: root, group (values of head or workers), container, ports, gpus. */}}
{{- define "shoal.pod" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "shoal.podLabels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .container }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: {{ .container }}
      image: {{ include "shoal.image" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      env:
        - name: SHOAL_CACHE
          value: /cache/shoal
        - name: HF_HOME
          value: /cache/huggingface
        # HAProxy in every pod, straight to the routers: Serve's own proxy costs a token more than a router does.
        - name: RAY_SERVE_ENABLE_HA_PROXY
          value: "1"
        - name: RAY_SERVE_THROUGHPUT_OPTIMIZED
          value: "1"
        {{- if $values.hubToken.existingSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ $values.hubToken.existingSecret }}
              key: {{ $values.hubToken.key }}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - name: {{ $name }}
          containerPort: {{ $port }}
        {{- end }}
      resources:
        {{- $resources := deepCopy .group.resources }}
        {{- if .gpus }}
        {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" .gpus) ($resources.limits | default dict)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /cache
        {{- if $values.apiKey.existingSecret }}
        - name: api-keys
          mountPath: /etc/shoal
          readOnly: true
        {{- end }}
  volumes:
    - name: cache
      {{- with include "shoal.claim" .root }}
      persistentVolumeClaim:
        claimName: {{ . }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ $values.cache.size }}
      {{- end }}
    {{- if $values.apiKey.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ $values.apiKey.existingSecret }}
        items:
          - key: {{ $values.apiKey.key }}
            path: api-keys
    {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
