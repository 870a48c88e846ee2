{{/*
Refuses values that would do nothing: those of a part that is switched off, or that another value overrides. Values that
are as in values.yaml are nobody's wish.
*/}}
{{- define "shoal.checkEffects" -}}
{{- $values := .Values -}}
{{- $facts := .Files.Get "defaults.json" | fromJson -}}
{{- range $key, $default := $facts.listening -}}
{{- if ne (index $values.config $key | default $default | toJson) (toJson $default) -}}
{{- fail (printf "config.%s does nothing here: HAProxy and Serve take connections, and do not know it" $key) -}}
{{- end -}}
{{- end -}}
{{- with $values.cache -}}
{{- $claim := printf "cache.existingClaim is %s, a claim that is there already" .existingClaim -}}
{{- $none := "without a claim (cache.create, cache.existingClaim) there is an emptyDir" -}}
{{- $idle := dict "root" $ "at" "cache" "facts" $facts -}}
{{- if .existingClaim -}}
{{- include "shoal.idle" (merge (dict "keys" (list "create" "size" "storageClassName") "why" $claim) $idle) -}}
{{- else if not .create -}}
{{- include "shoal.idle" (merge (dict "keys" (list "storageClassName" "accessModes") "why" $none) $idle) -}}
{{- end -}}
{{- end -}}
{{- range $at := list "apiKey" "hubToken" -}}
{{- if not (index $values $at).existingSecret -}}
{{- include "shoal.idle" (dict "root" $ "facts" $facts "at" $at "keys" (list "key") "why" (printf "%s.existingSecret names no Secret" $at)) -}}
{{- end -}}
{{- end -}}
{{- if not $values.autoscaling.enabled -}}
{{- $keys := list "minWorkers" "maxWorkers" "idleTimeoutSeconds" -}}
{{- include "shoal.idle" (dict "root" . "facts" $facts "at" "autoscaling" "keys" $keys "why" "autoscaling.enabled is false") -}}
{{- else if $values.autoscaling.maxWorkers -}}
{{- include "shoal.idle" (dict "root" . "facts" $facts "at" "workers" "keys" (list "count") "why" "autoscaling.maxWorkers says how many there may be") -}}
{{- end -}}
{{- range $at := list "networkPolicy" "ingress" "httpRoute" "disruptionBudget" "alerts" "dashboard" -}}
{{- if not (index $values $at).enabled -}}
{{- $keys := omit (index $facts.values $at) "enabled" | keys | sortAlpha -}}
{{- include "shoal.idle" (dict "root" $ "facts" $facts "at" $at "keys" $keys "why" (printf "%s.enabled is false" $at)) -}}
{{- end -}}
{{- end -}}
{{- if eq $values.device "cpu" -}}
{{- include "shoal.idle" (dict "root" . "facts" $facts "at" "workers" "keys" (list "gpuResource") "why" "device is cpu") -}}
{{- end -}}
{{- if and $values.models (ne $values.model $facts.values.model) -}}
{{- fail (printf "model is %s and does nothing: models has all that is served" $values.model) -}}
{{- end -}}
{{- $mounted := list -}}
{{- range $values.extraVolumeMounts }}{{ $mounted = append $mounted .name }}{{ end -}}
{{- range $values.extraVolumes -}}
{{- if not (has .name $mounted) -}}
{{- fail (printf "extraVolumes: %s does nothing: no entry of extraVolumeMounts mounts it" .name) -}}
{{- end -}}
{{- end -}}
{{- range $group := list "head" "workers" -}}
{{- range (index $values $group).tolerations -}}
{{- if and (hasKey . "tolerationSeconds") (ne (.effect | default "NoExecute") "NoExecute") -}}
{{- fail (printf "%s.tolerations: tolerationSeconds is for effect NoExecute: %s evicts no pod" $group .effect) -}}
{{- end -}}
{{- if and .value (eq (.operator | default "Equal") "Exists") -}}
{{- fail (printf "%s.tolerations: value %s does nothing: operator Exists compares none" $group .value) -}}
{{- end -}}
{{- if and (not .key) (ne (.operator | default "Equal") "Exists") -}}
{{- fail (printf "%s.tolerations: without a key, operator must be Exists: all taints" $group) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Takes a dict: root, facts, at (a table of the values), keys (of it), why (they do nothing). */}}
{{- define "shoal.idle" -}}
{{- range $key := .keys -}}
{{- $value := index (index $.root.Values $.at) $key -}}
{{- $default := index (index $.facts.values $.at) $key -}}
{{- if and (not (kindIs "invalid" $value)) (ne (toJson $value) (toJson $default)) -}}
{{- fail (printf "%s.%s is %v and does nothing: %s" $.at $key $value $.why) -}}
{{- end -}}
{{- end -}}
{{- end }}
