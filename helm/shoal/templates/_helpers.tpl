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

{{/* The models that replicas serve, as JSON: the one of the values, or those of `models` that are at no other endpoint. */}}
{{- define "shoal.models" -}}
{{- $values := .Values -}}
{{- $models := list -}}
{{- range $entry := $values.models | default (list (dict)) -}}
{{- if not (hasKey $entry "upstream") -}}
{{- $model := dict "name" ($entry.name | default "") "model" ($entry.model | default $values.model) -}}
{{- range $key := list "replicas" "tp" "pp" -}}
{{- $_ := set $model $key (int (index $entry $key | default (index $values $key))) -}}
{{- end -}}
{{- $_ := set $model "scaled" ($entry.max_replicas | default $values.config.max_replicas | default 0 | int) -}}
{{- $_ := set $model "most" (int ($model.scaled | default $model.replicas)) -}}
{{- $_ := set $model "rank" ($entry.cpus_per_rank | default $values.config.cpus_per_rank | default 1 | float64) -}}
{{- $_ := set $model "stage" (mulf $model.tp $model.rank) -}}
{{- $_ := set $model "of" (ternary (printf " of %s" $model.name) "" (ne $model.name "")) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- end -}}
{{ toJson $models }}
{{- end }}

{{/* The most replicas that there may be at once, of all models. */}}
{{- define "shoal.replicas" -}}
{{- $replicas := 0 -}}
{{- range include "shoal.models" . | fromJsonArray -}}
{{- $replicas = add $replicas (int .most) -}}
{{- end -}}
{{ $replicas }}
{{- end }}

{{/* Refuses `models` that the server would refuse, and keys of other endpoints that no container would have. */}}
{{- define "shoal.checkModels" -}}
{{- if .Values.models -}}
{{- range $key := list "served_model_name" "aliases" -}}
{{- if hasKey $.Values.config $key -}}
{{- fail (printf "config.%s is for one model; with models, each entry has its own" $key) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- $deployments := list -}}
{{- $environment := list -}}
{{- range .Values.env -}}
{{- $environment = append $environment .name -}}
{{- end -}}
{{- range .Values.models -}}
{{- $names = concat $names (list .name) (.aliases | default list) -}}
{{- if hasKey . "upstream" -}}
{{- with .upstream.api_key_env -}}
{{- if not (has . $environment) -}}
{{- fail (printf "models: env has no %s, which api_key_env names: add it, with the key from a Secret" .) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $deployments = append $deployments (include "shoal.deployment" .name) -}}
{{- end -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "models: names and aliases must differ from each other: %s" (join ", " $names)) -}}
{{- end -}}
{{- if ne (len $deployments) (len (uniq $deployments)) -}}
{{- fail (printf "models: several deployments are named alike, names must differ in letters: %s" (join ", " $deployments)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The name in Ray Serve of the deployment of one of several models; the only one's is Replica. */}}
{{- define "shoal.deployment" -}}
Replica-{{ regexReplaceAll "[^A-Za-z0-9_.-]" . "-" }}
{{- end }}

{{/* GPUs of a worker pod. A stage's ranks talk at every layer: they stay in one pod. */}}
{{- define "shoal.gpus" -}}
{{- if eq .Values.device "cpu" -}}
{{- if .Values.workers.gpusPerWorker }}{{ fail "workers.gpusPerWorker is for device cuda" }}{{ end -}}
0
{{- else -}}
{{- $largest := 1 -}}
{{- range include "shoal.models" . | fromJsonArray -}}
{{- $largest = max $largest (int .tp) -}}
{{- end -}}
{{- $gpus := int (.Values.workers.gpusPerWorker | default $largest) -}}
{{- if lt $gpus (int $largest) -}}
{{- fail (printf "workers.gpusPerWorker is %d, but the %d ranks of a stage (tp) must fit into one worker" $gpus (int $largest)) -}}
{{- end -}}
{{ $gpus }}
{{- end -}}
{{- end }}

{{/*
Places the stages of all replicas of all models on workers, the largest first, each on the first worker with room.
Takes a dict: root; gpus and cpus of a worker, null for any number; most workers, null for as many as it takes.
Gives JSON: workers that are used, and unplaced, the first model of which stages are left, with their number.
*/}}
{{- define "shoal.placed" -}}
{{- $sorted := list -}}
{{- $models := include "shoal.models" .root | fromJsonArray -}}
{{- range $index, $model := $models -}}
{{- $sorted = append $sorted (printf "%012.3f %06.0f %d" $model.stage $model.tp $index) -}}
{{- end -}}
{{- $free := list -}}
{{- $unplaced := dict -}}
{{- $limits := . -}}
{{- range $sorted | sortAlpha | reverse -}}
{{- $model := index $models (splitList " " . | last | int) -}}
{{- $from := 0 -}}
{{- $stages := mul (int $model.most) (int $model.pp) | int -}}
{{- range $stage := until $stages -}}
{{- $at := -1 -}}
{{- range $number := untilStep $from (len $free) 1 -}}
{{- if lt $at 0 -}}
{{- $worker := index $free $number -}}
{{- if and (ge $worker.cpus $model.stage) (ge $worker.gpus $model.tp) -}}
{{- $at = $number -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (lt $at 0) (or (kindIs "invalid" $limits.most) (lt (len $free) (int $limits.most))) -}}
{{- $cpus := ternary $model.stage $limits.cpus (kindIs "invalid" $limits.cpus) | float64 -}}
{{- $gpus := ternary $model.tp $limits.gpus (kindIs "invalid" $limits.gpus) | float64 -}}
{{- if and (ge $cpus $model.stage) (ge $gpus $model.tp) -}}
{{- $at = len $free -}}
{{- $free = append $free (dict "cpus" $cpus "gpus" $gpus) -}}
{{- end -}}
{{- end -}}
{{- if ge $at 0 -}}
{{- $from = $at -}}
{{- $worker := index $free $at -}}
{{- if not (kindIs "invalid" $limits.cpus) }}{{ $_ := set $worker "cpus" (subf $worker.cpus $model.stage) }}{{ end -}}
{{- if not (kindIs "invalid" $limits.gpus) }}{{ $_ := set $worker "gpus" (subf $worker.gpus $model.tp) }}{{ end -}}
{{- else if not $unplaced -}}
{{- $unplaced = dict "model" $model "placed" $stage "stages" $stages -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ dict "workers" (len $free) "unplaced" $unplaced | toJson }}
{{- end }}

{{/* Workers that all replicas need together: as many stages in each as its GPUs hold; on CPUs one replica in each. */}}
{{- define "shoal.workersNeeded" -}}
{{- if eq .Values.device "cpu" -}}
{{ max 1 (include "shoal.replicas" . | int) }}
{{- else -}}
{{- $placed := dict "root" . "gpus" (include "shoal.gpus" . | int) "cpus" nil "most" nil | include "shoal.placed" | fromJson -}}
{{ max 1 (int $placed.workers) }}
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
{{- fail (printf "%d workers at most, but the stages of all replicas need %d with %s GPUs each" $most $needed (include "shoal.gpus" .)) -}}
{{- end -}}
{{ $most }}
{{- end }}

{{- define "shoal.routers" -}}
{{- .Values.routers | default (max 1 (div (add (include "shoal.replicas" . | int) 1) 2)) -}}
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
{{- $router := .Values.config.cpus_per_router | default 1 | float64 -}}
{{- $most := include "shoal.maxWorkers" . | int -}}
{{- $routers := include "shoal.routers" . | int -}}
{{- $needed := mulf $routers $router -}}
{{- range include "shoal.models" . | fromJsonArray -}}
{{- if gt .stage $cpus -}}
{{- fail (printf "workers.resources: a worker has %v CPUs, and the ranks of a stage%s, which share one, need tp %d × cpus_per_rank %v = %v" $cpus .of (int .tp) .rank .stage) -}}
{{- end -}}
{{- $needed = addf $needed (mulf .most .pp .stage) (mulf .most 0.01) -}}
{{- end -}}
{{- if gt $router $cpus -}}
{{- fail (printf "workers.resources: a worker has %v CPUs, and a router needs cpus_per_router %v" $cpus $router) -}}
{{- end -}}
{{- $gpus := ternary (include "shoal.gpus" . | int) nil (eq .Values.device "cuda") -}}
{{- $placed := dict "root" . "gpus" $gpus "cpus" $cpus "most" $most | include "shoal.placed" | fromJson -}}
{{- with $placed.unplaced -}}
{{- fail (printf "workers.resources: %d workers of %v CPUs have room for %d of the %d stages%s: replicas %d × pp %d, each with %v CPUs" $most $cpus (int .placed) (int .stages) .model.of (int .model.most) (int .model.pp) .model.stage) -}}
{{- end -}}
{{- if gt $needed (mulf $most $cpus) -}}
{{- fail (printf "workers.resources: %d workers of %v CPUs have %v together, and the stages of %s replicas, a control actor (0.01) for each, and %d routers of %v need %v" $most $cpus (mulf $most $cpus) (include "shoal.replicas" .) $routers $router $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Helm reads every number as a float, and would write 8388608 as 8.388608e+06: whole numbers in a dict become such. */}}
{{- define "shoal.wholeNumbers" -}}
{{- range $key, $value := . -}}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) -}}
{{- $_ := set $ $key (int64 $value) -}}
{{- else if kindIs "map" $value -}}
{{- include "shoal.wholeNumbers" $value -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What Serve runs: the same application and the same keys as a configuration file for `shoal serve`. */}}
{{- define "shoal.serveConfig" -}}
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
    {{- if .scaled }}
    {{- if lt (int .scaled) (int .replicas) }}
    {{- fail (printf "replicas is %d%s, more than max_replicas %d: it is the number at the start" (int .replicas) .of (int .scaled)) }}
    {{- end }}
    {{- $scaled = true }}
    {{- end }}
    {{- end }}
    {{- if $scaled }}
    # So that the deployment Autoscaler may change numbers. After a change of one here, it goes on from that.
    external_scaler_enabled: true
    {{- end }}
    # Not among the arguments: Serve restarts everything when one of the arguments changes.
    deployments:
      {{- range $models }}
      - name: {{ ternary "Replica" (include "shoal.deployment" .name) (eq (len $models) 1) }}
        num_replicas: {{ int .replicas }}
      {{- end }}
      - name: Router
        num_replicas: {{ include "shoal.routers" . }}
{{- end }}

{{/* How long streams of what is taken away may go on, in whole seconds. */}}
{{- define "shoal.drainSeconds" -}}
{{- $drain := 120 -}}
{{- if hasKey .Values.config "drain_s" }}{{ $drain = .Values.config.drain_s }}{{ end -}}
{{ $drain | float64 | ceil | int }}
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
