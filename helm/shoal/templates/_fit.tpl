{{/* A quantity of Kubernetes as a number: cluster/quantity.py has the same grammar, and the schema refuses all else. */}}
{{- define "shoal.quantity" -}}
{{- $text := toString . -}}
{{- $number := regexFind `^([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?` $text -}}
{{- $factors := dict "n" 1e-9 "u" 1e-6 "m" 1e-3 "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- range $power, $name := list "Ki" "Mi" "Gi" "Ti" "Pi" "Ei" -}}
{{- $_ := set $factors $name (index (list 1024.0 1048576.0 1073741824.0 1099511627776.0 1125899906842624.0 1152921504606846976.0) $power) -}}
{{- end -}}
{{ mulf (float64 $number) (get $factors (trimPrefix $number $text)) | printf "%.17g" }}
{{- end }}

{{/* A quantity as a manifest has it. Helm reads 100e9 as a float, and would write 1e+11, which is no number to Kubernetes. */}}
{{- define "shoal.quantityText" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}{{ else }}{{ toString . }}{{ end -}}
{{- end }}

{{/*
Which workers there are, as JSON: workers (at most), least, gpus of each, cpus and memory (what a worker asks for by
default), ranks (on a worker), and routers. Refuses what Ray could never place: it would wait without a message.

Ray places what it can as soon as there is room, in any order, so there must be room in every order. Routers ask Ray for
next to no CPUs, but need them. A worker has room for $per routers and all stages that it can hold. Where it has not, each
worker has room for everything, or, on CPUs, so much is free that some worker always has room.
*/}}
{{- define "shoal.fit" -}}
{{- $values := .Values -}}
{{- $models := include "shoal.models" . | fromJsonArray -}}
{{- $cuda := eq $values.device "cuda" -}}
{{- $router := include "shoal.quantity" ($values.config.cpus_per_router | default 1) | float64 -}}
{{- $replicas := 0 -}}
{{- $stages := 0 -}}
{{- $needed := 0.0 -}}  {{/* CPUs of all stages and control actors */}}
{{- $large := 1 -}}  {{/* GPUs of the largest stage */}}
{{- $stage := 0.0 -}}  {{/* CPUs of the largest stage */}}
{{- $pp := 1 -}}
{{- $ranks := 0 -}}  {{/* of all replicas */}}
{{- $together := 1 -}}  {{/* ranks of a replica, on CPUs; ranks that share a GPU, on GPUs */}}
{{- $each := 0.0 -}}  {{/* most CPUs for one GPU */}}
{{- $sizes := dict -}}
{{- $shapes := list -}}
{{- range $models -}}
{{- if gt (max .most (mul .most .pp)) 10000 -}}
{{- fail (printf "replicas%s: %d replicas of %d stages are more than a server has" .of (int .most) (int .pp)) -}}
{{- end -}}
{{- $replicas = add $replicas .most -}}
{{- $stages = add $stages (mul .most .pp) -}}
{{- $needed = addf $needed (mulf .most .pp .stage) (mulf .most 0.01) -}}
{{- $large = max $large (int .tp) -}}
{{- $stage = maxf $stage .stage -}}
{{- $pp = max $pp (int .pp) -}}
{{- $ranks = add $ranks (mul .most .pp .tp) -}}
{{- $together = ternary .share (mul .pp .tp) $cuda | int | max $together -}}
{{- $each = maxf $each (divf (addf .stage 0.01) .gpus) -}}
{{- $size := printf "%06d" (int .tp) -}}
{{- $whole := divf (mul .most .pp) .share | ceil | int -}}  {{/* of stages that take GPUs of their own */}}
{{- $_ := set $sizes $size (add $whole (get $sizes $size | default 0 | int)) -}}
{{- $shapes = append $shapes (printf "%v %v" .stage .gpus) | uniq -}}
{{- end -}}
{{- $routers := int ($values.routers | default (max 1 (div (add $replicas 1) 2))) -}}
{{- $alike := eq (len $shapes) 1 -}}

{{- $gpus := 0 -}}
{{- $least := max 1 $replicas -}}  {{/* workers: on CPUs one a replica */}}
{{- if $cuda -}}
{{- $gpus = int ($values.workers.gpusPerWorker | default $large) -}}
{{- if lt $gpus (int $large) -}}
{{- fail (printf "workers.gpusPerWorker is %d, but the %d ranks of a stage (tp) must fit into one worker" $gpus (int $large)) -}}
{{- end -}}
{{- if gt $gpus 16 -}}
{{- fail (printf "tp is %d, more GPUs than a node has" $gpus) -}}
{{- end -}}
{{- $least = include "shoal.byGpus" (dict "gpus" $gpus "sizes" $sizes) | int | max 1 -}}
{{- else if $values.workers.gpusPerWorker -}}
{{- fail "workers.gpusPerWorker is for device cuda" -}}
{{- end -}}
{{- $workers := int ($values.workers.count | default $least) -}}
{{- $first := $workers -}}
{{- with $values.autoscaling -}}
{{- if .enabled -}}
{{- $workers = int (.maxWorkers | default $workers) -}}
{{- $first = int .minWorkers -}}
{{- if gt $first $workers -}}
{{- fail (printf "autoscaling.minWorkers is %d, more than the %d workers at most" $first $workers) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $cuda (lt $workers (int $least)) -}}
{{- fail (printf "%d workers at most, but the stages of all replicas need %d with %d GPUs each" $workers (int $least) $gpus) -}}
{{- end -}}

{{- $full := mulf $gpus $each -}}  {{/* CPUs of the stages on a worker whose GPUs are all taken */}}
{{- if and $cuda $alike -}}
{{- with first $models -}}
{{- $full = mulf (mul (div $gpus (int .tp)) (int .share)) (addf .stage 0.01) -}}
{{- end -}}
{{- end -}}
{{- /* By the sizes of stages and routers alone, enough for any number of replicas with the default number of routers. */ -}}
{{- $default := addf $stage 0.01 $router | ceil | maxf 4.0 -}}
{{- if or (not $alike) (gt (int $pp) 1) (ge $default (mulf 2 (addf $stage 0.01))) -}}  {{/* a worker may hold two stages */}}
{{- $default = addf (mulf $pp (addf $stage 0.01)) (mulf 0.5 $router) (maxf $stage $router) | ceil | maxf 4.0 -}}
{{- end -}}
{{- if $cuda -}}
{{- $default = addf $full (mulf $router (divf $gpus (mul 2 $large) | ceil)) | ceil -}}
{{- range $models -}}
{{- $default = maxf $default (addf $full (mulf $router (divf (mulf .share (div $gpus (int .tp))) 2 | ceil)) | ceil) -}}
{{- end -}}
{{- end -}}
{{- $given := $values.workers.resources | default dict -}}
{{- $cpus := ($given.limits | default dict).cpu | default ($given.requests | default dict).cpu | default $default -}}
{{- $cpus = include "shoal.quantity" $cpus | float64 | ceil -}}

{{- if gt $stage $cpus -}}
{{- range $models -}}
{{- if gt .stage $cpus -}}
{{- fail (printf "workers.resources: a worker has %v CPUs, and the ranks of a stage%s, which share one, need tp %d × cpus_per_rank %v = %v" $cpus .of (int .tp) (.cpus_per_rank | default 1) .stage) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt $router $cpus -}}
{{- fail (printf "workers.resources: a worker has %v CPUs, and a router needs cpus_per_router %v" $cpus $router) -}}
{{- end -}}
{{- $all := addf $needed (mulf $routers $router) -}}
{{- $have := mulf $workers $cpus -}}
{{- if gt (subf $all 0.00001) $have -}}
{{- fail (printf "workers.resources: %d workers of %v CPUs have %v together, and the stages of %d replicas, a control actor (0.01) for each, and %d routers of %v need %v" $workers $cpus $have (int $replicas) $routers $router $all) -}}
{{- end -}}

{{- $held := 0.0 -}}  {{/* stages that a worker holds, on CPUs */}}
{{- if and $alike (not $cuda) $models -}}
{{- $held = divf $cpus (addf $stage 0.01) | floor -}}
{{- $full = mulf $held (addf $stage 0.01) -}}
{{- end -}}
{{- $per := 0 -}}
{{- if or $cuda (and $alike $models) -}}
{{- $per = maxf 0.0 (divf (addf (subf $cpus $full) 0.00001) $router | floor) | int | min 100 -}}  {{/* 100: Serve takes no more */}}
{{- end -}}
{{- if $per -}}
{{- if gt $routers (mul $per $workers | int) -}}
{{- fail (printf "routers: %d are too many for %d workers of %v CPUs, which have room for %d each when they are full of replicas: give workers more CPUs (workers.resources.requests.cpu), or take more (workers.count)" $routers $workers $cpus $per) -}}
{{- else if and (not $cuda) (gt (float64 $stages) (mulf $held $workers)) -}}
{{- fail (printf "workers.resources: %d workers of %v CPUs have room for %v stages each, and replicas have %d: give workers more CPUs (requests.cpu), or take more (workers.count)" $workers $cpus $held (int $stages)) -}}
{{- end -}}
{{- else -}}
{{- $largest := maxf $stage $router -}}
{{- $enough := addf (divf (subf $all $largest) $workers) $largest -}}
{{- if $cuda }}{{ $enough = addf (minf $full $needed) (mulf $routers $router) }}{{ end -}}
{{- if gt (subf $enough 0.00001) $cpus -}}
{{- fail (printf "workers.resources: a worker has %v CPUs, and the stages of %d replicas and %d routers could be placed so that one of them finds no room: give workers %v CPUs (requests.cpu)" $cpus (int $replicas) $routers (ceil $enough)) -}}
{{- end -}}
{{- end -}}
{{- $memory := max 8 (add 2 (mul 2 $together)) -}}
{{- $here := divf $ranks $workers | ceil | int -}}
{{- if $cuda -}}
{{- $memory = max (mul 12 $gpus) (add 2 (mul 4 $gpus $together)) -}}
{{- $here = min $ranks (mul $gpus $together) -}}
{{- end -}}
{{ dict "workers" $workers "least" $first "gpus" $gpus "cpus" $default "memory" (printf "%dGi" $memory) "ranks" $here "routers" $routers | toJson }}
{{- end }}

{{/*
Workers that the stages need. Takes a dict: gpus of a worker; sizes, the number of stages by their GPUs. Sizes that divide
the next larger one, the largest a worker's GPUs, fill all gaps in whatever order they come; others get workers of their
own.
*/}}
{{- define "shoal.byGpus" -}}
{{- $gpus := .gpus -}}
{{- $free := list -}}
{{- $before := $gpus -}}
{{- $divides := true -}}
{{- range $size := keys .sizes | sortAlpha | reverse -}}
{{- $tp := regexReplaceAll "^0+" $size "" | int -}}
{{- $left := int (get $.sizes $size) -}}
{{- $divides = and $divides (eq (mod $before $tp) 0) -}}
{{- if $divides -}}
{{- range $worker := $free -}}
{{- $taken := min $left (div $worker.gpus $tp) | int -}}
{{- $_ := set $worker "gpus" (sub $worker.gpus (mul $taken $tp) | int) -}}
{{- $left = sub $left $taken | int -}}
{{- end -}}
{{- end -}}
{{- $before = $tp -}}
{{- $held := div $gpus $tp | int -}}
{{- range $number := until (divf $left $held | ceil | int) -}}
{{- $taken := min $held (sub $left (mul $number $held)) | int -}}
{{- $free = append $free (dict "gpus" (sub $gpus (mul $taken $tp) | int)) -}}
{{- end -}}
{{- end -}}
{{ len $free }}
{{- end }}
