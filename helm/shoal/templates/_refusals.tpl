{{/*
Refuses values with which pods would never be made, never start, or not hold what runs in them. Takes a dict: root, fit
(of shoal.fit), pods (head and worker, as they are rendered).
*/}}
{{- define "shoal.check" -}}
{{- $values := .root.Values -}}
{{- include "shoal.checkPaths" .root -}}
{{- include "shoal.checkCache" . -}}
{{- if and (eq $values.device "cuda") (hasSuffix "-cpu" ($values.image.tag | default "")) -}}
{{- fail (printf "image.tag is %s, and device is cuda: that image has no FlashInfer and no nvcc" $values.image.tag) -}}
{{- end -}}
{{- range $group, $pod := .pods -}}
{{- include "shoal.checkPod" (dict "group" $group "pod" $pod) -}}
{{- include "shoal.checkResources" (dict "at" (printf "%s.resources" $group) "it" (first $pod.spec.containers).resources) -}}
{{- end -}}
{{- include "shoal.checkMemory" (dict "at" "head.resources" "it" (first .pods.head.spec.containers).resources "least" 2) -}}
{{- $ranks := mul .fit.ranks (ternary 2 1 (eq $values.device "cuda")) -}}
{{- include "shoal.checkMemory" (dict "at" "workers.resources" "it" (first .pods.workers.spec.containers).resources "least" (add 2 $ranks)) -}}
{{- if gt (include "shoal.drainSeconds" .root | float64) 86400.0 -}}
{{- fail (printf "config.drain_s is %v: no pod may take longer than a day (86400) to end" $values.config.drain_s) -}}
{{- end -}}
{{- include "shoal.checkEffects" .root -}}
{{- end }}

{{/* Names that a pod must not have twice, and mounts of volumes that there are not. */}}
{{- define "shoal.checkPod" -}}
{{- $container := first .pod.spec.containers -}}
{{- $volumes := list "shared-mem" -}}  {{/* KubeRay's own, at /dev/shm */}}
{{- range .pod.spec.volumes -}}
{{- if has .name $volumes }}{{ fail (printf "extraVolumes: %s is the name of another volume of the pod" .name) }}{{ end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $paths := list "/dev/shm" -}}
{{- range $container.volumeMounts -}}
{{- if not (isAbs .mountPath) }}{{ fail (printf "extraVolumeMounts: mountPath %s must begin with /" .mountPath) }}{{ end -}}
{{- if has (clean .mountPath) $paths }}{{ fail (printf "extraVolumeMounts: another volume of the pod is at %s" .mountPath) }}{{ end -}}
{{- $paths = append $paths (clean .mountPath) -}}
{{- if not (has .name $volumes) }}{{ fail (printf "extraVolumeMounts: there is no volume %s in extraVolumes" .name) }}{{ end -}}
{{- end -}}
{{- $names := list -}}
{{- range $container.env -}}
{{- if has .name $names }}{{ fail (printf "env: %s is there twice, or is the chart's own to set" .name) }}{{ end -}}
{{- if and (hasKey . "value") (hasKey . "valueFrom") }}{{ fail (printf "env: %s has both value and valueFrom" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end }}

{{/* Takes a dict: at (for messages), it (a container's resources). */}}
{{- define "shoal.checkResources" -}}
{{- $at := .at -}}
{{- $limits := .it.limits | default dict -}}
{{- $requests := .it.requests | default dict -}}
{{- range $name, $quantity := $requests -}}
{{- $asked := include "shoal.quantity" $quantity | float64 -}}
{{- $limit := index $limits $name -}}
{{- if not (kindIs "invalid" $limit) -}}
{{- if gt $asked (include "shoal.quantity" $limit | float64) -}}
{{- fail (printf "%s: requests.%s %v is more than limits.%s %v" $at $name $quantity $name $limit) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "/|^hugepages-" $name -}}
{{- if ne $asked (include "shoal.quantity" ($limit | default 0) | float64) -}}
{{- fail (printf "%s: requests.%s %v must be equal to limits.%s" $at $name $quantity $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $table := list $limits $requests -}}
{{- range $name, $quantity := $table -}}
{{- $amount := include "shoal.quantity" $quantity | float64 -}}
{{- if not (regexMatch "^(cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|.+/.+)$" $name) -}}
{{- fail (printf "%s: Kubernetes knows no %s: resources of a plugin have a domain, as rdma/hca" $at $name) -}}
{{- end -}}
{{- if le $amount 0.0 -}}
{{- fail (printf "%s: %s is %v" $at $name $quantity) -}}
{{- end -}}
{{- if and (contains "/" $name) (ne $amount (floor $amount)) -}}
{{- fail (printf "%s: %s is %v, and comes in whole numbers only" $at $name $quantity) -}}
{{- end -}}
{{- if and (eq $name "cpu") (ne (mulf $amount 1000) (mulf $amount 1000 | floor)) -}}
{{- fail (printf "%s: cpu is %v, and Kubernetes counts in thousandths (1m)" $at $quantity) -}}
{{- end -}}
{{- if and (ne $name "cpu") (not (contains "/" $name)) (regexMatch "[num]$" (toString $quantity)) -}}
{{- fail (printf "%s: %s is %v: there are no thousandths of a byte" $at $name $quantity) -}}
{{- end -}}
{{- if and (eq $name "cpu") (gt $amount 1024.0) -}}
{{- fail (printf "%s: cpu is %v, more than a node has" $at $quantity) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Takes a dict: at (for messages), it (a container's resources), least (GiB). */}}
{{- define "shoal.checkMemory" -}}
{{- $limit := .it.limits.memory -}}
{{- if lt (include "shoal.quantity" $limit | float64) (mulf .least 1073741824.0) -}}
{{- fail (printf "%s: memory %v does not hold what runs there: Ray, routers and ranks need at least %dGi" .at $limit (int .least)) -}}
{{- end -}}
{{- if gt (include "shoal.quantity" $limit | float64) 70368744177664.0 -}}
{{- fail (printf "%s: memory is %v, more than a node has" .at $limit) -}}
{{- end -}}
{{- end }}

{{- define "shoal.checkCache" -}}
{{- with .root.Values.cache -}}
{{- if and .create (not .existingClaim) (not (has "ReadWriteMany" .accessModes)) (gt (int $.fit.workers) 1) -}}
{{- fail (printf "cache.accessModes is %s, and %d workers share the claim, on as many nodes: ReadWriteMany is needed" (join ", " .accessModes) (int $.fit.workers)) -}}
{{- end -}}
{{- $needed := 0.0 -}}
{{- $known := ($.root.Files.Get "defaults.json" | fromJson).known -}}
{{- range include "shoal.models" $.root | fromJsonArray -}}
{{- $needed = addf $needed (get $known .model | default 0) -}}
{{- end -}}
{{- $size := include "shoal.quantity" .size | float64 -}}
{{- if or (lt $size 1.0) (regexMatch "[num]$" (toString .size)) -}}
{{- fail (printf "cache.size is %v: a size is in whole bytes, as 20Gi" .size) -}}
{{- end -}}
{{- if and (not .existingClaim) (lt $size $needed) -}}
{{- fail (printf "cache.size is %v, and the models need %d bytes" .size (int64 $needed)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Refuses models and folders that are nowhere: a folder must be on a volume, or in the image. */}}
{{- define "shoal.checkPaths" -}}
{{- $roots := concat (list "/cache") (.Values.image.folders | default list) -}}
{{- range .Values.extraVolumeMounts }}{{ $roots = append $roots .mountPath }}{{ end -}}
{{- $known := (.Files.Get "defaults.json" | fromJson).known -}}
{{- $models := include "shoal.models" . | fromJsonArray -}}
{{- $folders := dict -}}
{{- range $model := $models -}}
{{- range $key := list "model" "draft_model" -}}
{{- with index $model $key -}}
{{- if isAbs . -}}
{{- $_ := set $folders (printf "%s%s" $key $model.of) . -}}
{{- else if not (or (hasKey $known .) (regexMatch `^[\w-][\w.-]*/[\w.-]+$` .)) -}}
{{- fail (printf "%s is %q%s: no known name (%s), no hub's ORG/NAME, and no folder, as /cache/NAME" $key . $model.of (keys $known | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $folder := $model.lora_modules }}{{ $_ := set $folders (printf "lora_modules.%s%s" $name $model.of) $folder }}{{ end -}}
{{- end -}}
{{- with .Values.config.response_store_dir }}{{ $_ := set $folders "response_store_dir" . }}{{ end -}}
{{- range $what, $folder := $folders -}}
{{- $held := false -}}
{{- range $root := $roots -}}
{{- $held = or $held (eq (clean $folder) (clean $root)) (hasPrefix (printf "%s/" (clean $root)) (clean $folder)) -}}
{{- end -}}
{{- if not $held -}}
{{- fail (printf "%s is at %q, where no volume is: /cache is one; mount others with extraVolumes and extraVolumeMounts, or name a folder of your image in image.folders" $what $folder) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What a container asks for, where the values leave something out. Takes a dict: it (resources), cpu, memory, gpu (a
resource's name), gpus. */}}
{{- define "shoal.resources" -}}
{{- $limits := dict -}}
{{- $requests := dict -}}
{{- range $name, $quantity := (.it | default dict).limits }}{{ if not (kindIs "invalid" $quantity) }}{{ $_ := set $limits $name (include "shoal.quantityText" $quantity) }}{{ end }}{{ end -}}
{{- range $name, $quantity := (.it | default dict).requests }}{{ if not (kindIs "invalid" $quantity) }}{{ $_ := set $requests $name (include "shoal.quantityText" $quantity) }}{{ end }}{{ end -}}
{{- range $name, $quantity := merge (dict) $limits $requests -}}
{{- if regexMatch "(^|[./-])gpu($|[./-])|/mig-" $name -}}
{{- fail (printf "resources: %s: GPUs are given by workers.gpuResource and workers.gpusPerWorker" $name) -}}
{{- end -}}
{{- end -}}
{{- if not (or (hasKey $limits "cpu") (hasKey $requests "cpu")) }}{{ $_ := set $requests "cpu" (toString .cpu) }}{{ end -}}
{{- if not (hasKey $limits "memory") }}{{ $_ := set $limits "memory" ($requests.memory | default .memory) }}{{ end -}}
{{- if not (hasKey $requests "memory") }}{{ $_ := set $requests "memory" $limits.memory }}{{ end -}}
{{- if .gpus }}{{ $_ := set $limits .gpu (int .gpus) }}{{ end -}}
{{ dict "limits" $limits "requests" $requests | toYaml }}
{{- end }}
