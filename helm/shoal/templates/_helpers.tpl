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
{{- with .Values.image -}}
{{- if and .digest (not .tag) -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default (printf "%s-%s" $.Chart.AppVersion $.Values.device) }}{{ with .digest }}@{{ . }}{{ end }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "shoal.claim" -}}
{{ .Values.cache.existingClaim | default (ternary (printf "%s-cache" (include "shoal.name" .)) "" .Values.cache.create) }}
{{- end }}

{{/* Helm reads every number as a float, and would write 8388608 as 8.388608e+06: whole numbers in a dict become such. */}}
{{- define "shoal.wholeNumbers" -}}
{{- range $key, $value := . -}}
{{- if has (kindOf $value) (list "float64" "int64") -}}
{{- if gt (float64 $value) 9007199254740992.0 }}{{ fail (printf "%s is %v: there are no such numbers" $key $value) }}{{ end -}}
{{- end -}}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) -}}
{{- $_ := set $ $key (int64 $value) -}}
{{- else if kindIs "map" $value -}}
{{- include "shoal.wholeNumbers" $value -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What Serve runs: the same application and the same keys as a configuration file for `shoal serve`. */}}
{{- define "shoal.serveConfig" -}}
{{- $fit := include "shoal.fit" . | fromJson -}}
{{- $scaled := false -}}
{{- $args := deepCopy .Values.config -}}
{{- range $key := list "device" "tp" "pp" -}}
{{- $_ := set $args $key (index $.Values $key) -}}
{{- end -}}
{{- if .Values.models -}}
{{- $entries := list -}}
{{- range .Values.models -}}
{{- $entry := omit (deepCopy .) "replicas" -}}
{{- include "shoal.wholeNumbers" $entry -}}
{{- $entries = append $entries $entry -}}
{{- end -}}
{{- $_ := set $args "models" $entries -}}
{{- else -}}
{{- $_ := set $args "model" .Values.model -}}
{{- end -}}
{{- include "shoal.wholeNumbers" $args -}}
{{- if .Values.apiKey.existingSecret -}}
{{- $_ := set $args "api_key_file" "/etc/shoal/api-keys" -}}
{{- end -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  # A HAProxy of before a change still takes requests on connections that were idle, while its routers answer: 30 s.
  keep_alive_timeout_s: 20
applications:
  - name: shoal
    import_path: cluster.app:build
    route_prefix: /
    args:
      {{- toYaml $args | nindent 6 }}
    {{- $models := include "shoal.models" . | fromJsonArray }}
    {{- range $models }}
    {{- $scaled = or $scaled .max_replicas }}
    {{- end }}
    {{- if $scaled }}
    # So that the deployment Autoscaler may change numbers. After a change of one here, it goes on from that.
    external_scaler_enabled: true
    {{- end }}
    # Not among the arguments: Serve restarts everything when one of the arguments changes.
    deployments:
      {{- range $models }}
      - name: {{ ternary "Replica" (include "shoal.deployment" (.name | default "")) (eq (len $models) 1) }}
        num_replicas: {{ int .replicas }}
      {{- end }}
      - name: Router
        num_replicas: {{ int $fit.routers }}
{{- end }}

{{/* How long streams of what is taken away may go on, in whole seconds. */}}
{{- define "shoal.drainSeconds" -}}
{{- $drain := 120 -}}
{{- if hasKey .Values.config "drain_s" }}{{ $drain = .Values.config.drain_s }}{{ end -}}
{{ $drain | float64 | ceil | int }}
{{- end }}

{{/* A pod of the Ray cluster. Takes a dict: root, group (values of head or workers), container, ports, cpu and
memory (by default), gpus. */}}
{{- define "shoal.pod" -}}
{{- $values := .root.Values -}}
{{- $claim := ternary (include "shoal.claim" .root) "" (eq .container "ray-worker") -}}
{{- $ownResponses := and $claim (has "ReadWriteMany" $values.cache.accessModes) -}}
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
  # Longer than a replica or a router on it may take to end.
  terminationGracePeriodSeconds: {{ add (include "shoal.drainSeconds" .root | int) 60 }}
  containers:
    - name: {{ .container }}
      image: {{ include "shoal.image" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if eq .container "ray-worker" }}
      # Ray would end everything on the pod's SIGTERM: Serve moves it first.
      lifecycle:
        preStop:
          exec:
            command: [python, -m, cluster.leave_node, {{ add (include "shoal.drainSeconds" .root | int) 50 | quote }}]
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      env:
        - name: SHOAL_CACHE
          value: /cache/shoal
        - name: HF_HOME
          value: /cache/huggingface
        # Compiled kernels, which every pod would else make again.
        - name: FLASHINFER_WORKSPACE_BASE
          value: /cache
        - name: TRITON_CACHE_DIR
          value: /cache/triton
        # Ray starts workers at niceness 15: under any other load of the node, replicas would starve.
        - name: RAY_worker_niceness
          value: "0"
        # HAProxy in every pod, straight to the routers: Serve's own proxy costs a token more than a router does.
        - name: RAY_SERVE_ENABLE_HA_PROXY
          value: "1"
        - name: RAY_SERVE_THROUGHPUT_OPTIMIZED
          value: "1"
        # After each change of routers new HAProxies take over. Those of before end with their last stream: 0 is never.
        - name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
          value: "0"
        {{- if eq .container "ray-head" }}
        # Where there is no router, requests come to Serve's own proxy on the head: it answers 503.
        - name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
          value: cluster.no_router:middlewares
        {{- end }}
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
        {{- include "shoal.resources" (dict "it" .group.resources "cpu" .cpu "memory" .memory "gpu" $values.workers.gpuResource "gpus" .gpus) | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /cache
        {{- if $ownResponses }}
        # A file of SQLite, which machines must not share.
        - name: responses
          mountPath: /cache/shoal/responses
        {{- end }}
        {{- if $values.apiKey.existingSecret }}
        - name: api-keys
          mountPath: /etc/shoal
          readOnly: true
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: cache
      {{- if $claim }}
      persistentVolumeClaim:
        claimName: {{ $claim }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ include "shoal.quantityText" $values.cache.size | quote }}
      {{- end }}
    {{- if $ownResponses }}
    - name: responses
      emptyDir: {}
    {{- end }}
    {{- if $values.apiKey.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ $values.apiKey.existingSecret }}
        items:
          - key: {{ $values.apiKey.key }}
            path: api-keys
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
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
