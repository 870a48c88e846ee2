{{/*
The models that replicas serve, as JSON: the one of the values, or those of `models` that are at no other endpoint. Each
with all settings of a replica, as cluster/config.py makes them, and: of (for messages), most (replicas that there may be
at once), stage (CPUs of a stage's ranks), gpus (GPUs of a stage), share (replicas that share a GPU).
*/}}
{{- define "shoal.models" -}}
{{- $values := .Values -}}
{{- $base := (.Files.Get "defaults.json" | fromJson).config -}}
{{- range $key, $value := $values.config }}{{ $_ := set $base $key $value }}{{ end -}}
{{- range $key := list "device" "tp" "pp" "replicas" }}{{ $_ := set $base $key (index $values $key) }}{{ end -}}
{{- $models := list -}}
{{- range $entry := $values.models | default (list (dict "model" $values.model)) -}}
{{- if not (hasKey $entry "upstream") -}}
{{- $model := deepCopy $base -}}
{{- range $key, $value := $entry }}{{ $_ := set $model $key $value }}{{ end -}}
{{- if kindIs "invalid" $model.replicas -}}
{{- $near := max 2 (int $model.min_replicas) -}}
{{- if $model.max_replicas }}{{ $near = min $near (int $model.max_replicas) }}{{ end -}}
{{- $_ := set $model "replicas" (max 1 $near) -}}
{{- end -}}
{{- with $model.cpus_per_rank }}{{ $_ := set $model "cpus_per_rank" (include "shoal.quantity" . | float64) }}{{ end -}}
{{- $_ := set $model "of" (ternary (printf " of %s" $entry.name) "" (hasKey $entry "name")) -}}
{{- $_ := set $model "most" (int ($model.max_replicas | default $model.replicas)) -}}
{{- $_ := set $model "stage" (mulf $model.tp ($model.cpus_per_rank | default 1)) -}}
{{- $_ := set $model "gpus" (mulf $model.tp $model.gpus_per_rank) -}}
{{- $_ := set $model "share" (divf 1 $model.gpus_per_rank | floor | int) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- end -}}
{{ toJson $models }}
{{- end }}

{{/* The name in the API of the only model: as cluster/models.py has it. */}}
{{- define "shoal.served" -}}
{{- $hub := regexMatch `^[\w-][\w.-]*/[\w.-]+$` .Values.model -}}
{{- .Values.config.served_model_name | default (ternary .Values.model (base .Values.model | trimSuffix ".gguf") $hub) -}}
{{- end }}

{{/* The name in Ray Serve of the deployment of one of several models; the only one's is Replica. */}}
{{- define "shoal.deployment" -}}
Replica-{{ regexReplaceAll "[^A-Za-z0-9_.-]" . "-" }}
{{- end }}

{{/* Refuses what the server would refuse once its pods run: the rules of cluster/config.py between several settings. */}}
{{- define "shoal.checkModels" -}}
{{- $models := include "shoal.models" . | fromJsonArray -}}
{{- $defaults := (.Files.Get "defaults.json" | fromJson).config -}}
{{- $top := dict -}}
{{- range $table := list $defaults .Values.config (pick .Values "tp" "pp" "replicas") -}}
{{- range $key, $value := $table }}{{ $_ := set $top $key $value }}{{ end -}}
{{- end -}}
{{- include "shoal.checkSettings" (dict "root" . "it" $top "of" "") -}}
{{- range $models -}}
{{- include "shoal.checkSettings" (dict "root" $ "it" . "of" .of) -}}
{{- end -}}
{{- range $key, $least := (.Files.Get "defaults.json" | fromJson).least -}}
{{- with index $.Values.config $key -}}
{{- $amount := include "shoal.quantity" . | float64 -}}
{{- if lt $amount $least -}}
{{- fail (printf "config.%s is %v, and must be at least %v" $key . $least) -}}
{{- end -}}
{{- if and (hasSuffix "_bytes" $key) (ne $amount (floor $amount)) -}}
{{- fail (printf "config.%s is %v: a size is in whole bytes, as 64Mi" $key .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.config.require_auth_for_metrics_endpoint (not .Values.apiKey.existingSecret) -}}
{{- fail "config.require_auth_for_metrics_endpoint needs keys: set apiKey.existingSecret" -}}
{{- end -}}
{{- if and .Values.models (not $models) (eq .Values.device "cuda") -}}
{{- fail "device is cuda, but all models are at other endpoints: GPUs would stand idle, leave device at cpu" -}}
{{- end -}}
{{- include "shoal.checkNames" (dict "root" . "models" $models) -}}
{{- end }}

{{/* Takes a dict: root; it, a table of settings with their defaults; of, whose they are. */}}
{{- define "shoal.checkSettings" -}}
{{- $of := .of -}}
{{- $defaults := (.root.Files.Get "defaults.json" | fromJson).config -}}
{{- with .it -}}
{{- $it := . -}}
{{- if not .max_replicas -}}
{{- range $key := list "min_replicas" "target_wait_s" "downscale_delay_s" -}}
{{- if ne (index $it $key | float64) (index $defaults $key | float64) -}}
{{- fail (printf "%s is %v%s, but without max_replicas there is no autoscaling: set max_replicas too" $key (index $it $key) $of) -}}
{{- end -}}
{{- end -}}
{{- else if gt (int .min_replicas) (int .max_replicas) -}}
{{- fail (printf "min_replicas is %d%s, more than max_replicas %d" (int .min_replicas) $of (int .max_replicas)) -}}
{{- else if not (kindIs "invalid" .replicas) -}}
{{- if lt (int .replicas) (int .min_replicas) -}}
{{- fail (printf "replicas is %d%s, less than min_replicas %d: it is the number at the start, leave it out" (int .replicas) $of (int .min_replicas)) -}}
{{- else if gt (int .replicas) (int .max_replicas) -}}
{{- fail (printf "replicas is %d%s, more than max_replicas %d: it is the number at the start, leave it out" (int .replicas) $of (int .max_replicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (lt (float64 .gpus_per_rank) 1.0) (or (gt (int .tp) 1) (gt (int .pp) 1)) -}}
{{- fail (printf "gpus_per_rank is %v%s, but ranks of tp %d, pp %d cannot share a GPU: leave it at 1" .gpus_per_rank $of (int .tp) (int .pp)) -}}
{{- end -}}
{{- range $key := list "gpus_per_rank" "cpus_per_rank" "cpus_per_router" -}}
{{- with index $it $key -}}
{{- if lt (include "shoal.quantity" . | float64) 0.0001 -}}
{{- fail (printf "%s is %v%s, and must be at least 0.0001: Ray counts in ten thousandths" $key . $of) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .kv_tokens -}}
{{- if lt (int64 .) (int64 $it.page_size) -}}
{{- fail (printf "kv_tokens is %d%s, less than one page: page_size is %d" (int64 .) $of (int $it.page_size)) -}}
{{- end -}}
{{- if gt (int64 ($it.context_length | default 0)) (int64 .) -}}
{{- fail (printf "context_length is %d%s and does not fit into kv_tokens %d: raise kv_tokens" (int64 $it.context_length) $of (int64 .)) -}}
{{- end -}}
{{- end -}}
{{- if and .tbt_slo .schedule (ne .schedule "uniform") -}}
{{- fail (printf "tbt_slo is %v%s and needs schedule uniform: %s keeps to no time" .tbt_slo $of .schedule) -}}
{{- end -}}
{{- if and (ne .finish "all") (ne (.schedule | default "") "offline") -}}
{{- fail (printf "finish is %s%s and needs schedule offline: only jobs end as a whole" .finish $of) -}}
{{- end -}}
{{- if .draft_model -}}
{{- if gt (int .pp) 1 -}}
{{- fail (printf "draft_model needs pp 1%s, not pp %d" $of (int .pp)) -}}
{{- end -}}
{{- if eq .speculation "off" -}}
{{- fail (printf "draft_model needs speculation auto%s: with speculation off no drafts are verified" $of) -}}
{{- end -}}
{{- end -}}
{{- if and .enable_expert_parallel (eq (int .tp) 1) -}}
{{- fail (printf "enable_expert_parallel needs tp above 1%s: it divides experts among the ranks of a stage" $of) -}}
{{- end -}}
{{- if and .lora_modules (not (kindIs "invalid" .max_loras)) -}}
{{- if eq (int .max_loras) 0 -}}
{{- fail (printf "lora_modules need room%s: max_loras is 0" $of) -}}
{{- end -}}
{{- end -}}
{{- with .stage_layers -}}
{{- if ne (splitList "," . | len) (int $it.pp) -}}
{{- fail (printf "stage_layers is %s%s: of %d stages, and pp is %d" . $of (splitList "," . | len) (int $it.pp)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Takes a dict: root, models. */}}
{{- define "shoal.checkNames" -}}
{{- $environment := list -}}
{{- range .root.Values.env }}{{ $environment = append $environment .name }}{{ end -}}
{{- $names := list -}}
{{- $deployments := list -}}
{{- range .models -}}
{{- $names = concat $names (keys .lora_modules) -}}
{{- end -}}
{{- with .root.Values.models -}}
{{- range $key := list "served_model_name" "aliases" -}}
{{- if hasKey $.root.Values.config $key -}}
{{- fail (printf "config.%s is for one model; with models, each entry has its own" $key) -}}
{{- end -}}
{{- end -}}
{{- range . -}}
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
{{- else -}}
{{- $names = concat $names (list (include "shoal.served" .root)) (.root.Values.config.aliases | default list) -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "models: names, aliases and names of lora_modules must differ from each other: %s" (join ", " $names)) -}}
{{- end -}}
{{- if ne (len $deployments) (len (uniq $deployments)) -}}
{{- fail (printf "models: several deployments are named alike, names must differ in letters: %s" (join ", " $deployments)) -}}
{{- end -}}
{{- end }}
