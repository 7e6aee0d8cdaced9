{{/* Sets in the first dictionary what the second one has, in depth; lists are replaced. */}}
{{- define "inflight.overlay" -}}
{{- $base := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $base $key)) -}}
{{- include "inflight.overlay" (list (get $base $key) $value) -}}
{{- else -}}
{{- $_ := set $base $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The whole cores that a pool requests, at least one. A worker's own default, the cores of the node, would be too many threads. */}}
{{- define "inflight.cores" -}}
{{- $cpu := ($.resources.requests | default dict).cpu | default 1 | toString -}}
{{- max 1 (ternary (div (trimSuffix "m" $cpu | int) 1000) (float64 $cpu | floor | int) (hasSuffix "m" $cpu)) -}}
{{- end -}}

{{/*
The pools with their defaults, a YAML list. Each has besides: fullName; kinds, the sources given; gpus and ranks; autoscaled; least
and most, between which its number of workers stays.
*/}}
{{- define "inflight.pools" -}}
{{- $root := . -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
{{- $pool := deepCopy $root.Values.poolDefaults -}}
{{- include "inflight.overlay" (list $pool .) -}}
{{- $kinds := list -}}
{{- range $kind, $fields := $pool.model.source -}}
{{- if not (kindIs "invalid" $fields) -}}{{- $kinds = append $kinds $kind -}}{{- end -}}
{{- end -}}
{{- $_ := set $pool "kinds" $kinds -}}
{{- $_ := set $pool "fullName" (printf "%s-%s" (include "inflight.fullname" $root) .name) -}}
{{- $cuda := eq $pool.device "cuda" -}}
{{- $gpus := ternary (coalesce $pool.gpusPerWorker $pool.tensorParallel 1) 0 $cuda | int -}}
{{- $_ := set $pool "gpus" $gpus -}}
{{- $_ := set $pool "ranks" (coalesce $pool.tensorParallel (ternary $gpus 1 $cuda) | int) -}}
{{- $autoscaled := ne $pool.autoscaling.type "none" -}}
{{- $_ := set $pool "autoscaled" $autoscaled -}}
{{- $fixed := ternary 1 $pool.replicas (kindIs "invalid" $pool.replicas) -}}
{{- if and (not $cuda) (kindIs "invalid" $pool.engine.threads) -}}
{{- $_ := set $pool.engine "threads" (include "inflight.cores" $pool) -}}
{{- end -}}
{{- $_ := set $pool "least" (ternary $pool.autoscaling.minReplicas $fixed $autoscaled | int) -}}
{{- $_ := set $pool "most" (ternary $pool.autoscaling.maxReplicas $fixed $autoscaled | int) -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* Whether a pool may sleep at zero: "some" of them, "all", or nothing. */}}
{{- define "inflight.sleeping" -}}
{{- $sleeping := 0 -}}
{{- $awake := 0 -}}
{{- range include "inflight.pools" . | fromYamlArray -}}
{{- if and .autoscaled (eq (int .least) 0) -}}{{- $sleeping = add1 $sleeping -}}
{{- else if gt (int .least) 0 -}}{{- $awake = add1 $awake -}}{{- end -}}
{{- end -}}
{{- if gt (int $sleeping) 0 -}}{{- ternary "all" "some" (eq (int $awake) 0) -}}{{- end -}}
{{- end -}}

{{/* Where the routers find the workers: the host names that StatefulSets keep over restarts, or the services' endpoints. */}}
{{- define "inflight.workers" -}}
{{- $root := . -}}
{{- $workers := list -}}
{{- range $pool := include "inflight.pools" . | fromYamlArray -}}
{{- if eq $root.Values.router.discovery "kubernetes" -}}
{{- $workers = append $workers (printf "kubernetes://%s/%s:8652" $root.Release.Namespace $pool.fullName) -}}
{{- else if eq $root.Values.router.discovery "dns" -}}
{{- $workers = append $workers (printf "dns://%s.%s.svc:8652" $pool.fullName $root.Release.Namespace) -}}
{{- else -}}
{{- range $number := until (int $pool.least) -}}
{{- $workers = append $workers (printf "%s-%d.%s.%s.svc:8652" $pool.fullName $number $pool.fullName $root.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join "," $workers -}}
{{- end -}}

{{/* What a worker's pod asks for, with its GPUs. */}}
{{- define "inflight.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $limits := default dict $resources.limits -}}
{{- $_ := set $limits .gpuResource (int .gpus) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Flags for the engine of a pool, a list. */}}
{{- define "inflight.engineArgs" -}}
{{- $engine := .engine -}}
{{- if gt (int .ranks) 1 }}
- --tensor-parallel={{ int .ranks }}
{{- end }}
{{- range $key := list "threads" "maxSequences" "maxBatchTokens" "maxContextTokens" "maxWaiting" "blockTokens" "draftsMax" "decodeReserveTokens" "preemptionThreshold" "bypassMax" }}
{{- if not (kindIs "invalid" (index $engine $key)) }}
- --{{ kebabcase $key }}={{ int64 (index $engine $key) }}
{{- end }}
{{- end }}
{{- range $key := list "quantize" "kvCacheBytes" "kvCacheDtype" "gpuMemoryUtilization" "hostCacheBytes" "policy" "stepTarget" "sloTtft" "sloGap" "drafts" "kvWatermark" }}
{{- if not (kindIs "invalid" (index $engine $key)) }}
- {{ printf "--%s=%v" (kebabcase $key) (index $engine $key) | quote }}
{{- end }}
{{- end }}
{{- if $engine.deterministic }}
- --deterministic
{{- end }}
{{- if not $engine.autotune }}
- --no-autotune
{{- end }}
{{- if not $engine.prefixCache }}
- --no-prefix-cache
{{- end }}
{{- if $engine.overlap }}
- --overlap
{{- end }}
{{- end -}}

{{/* All flags of a worker, a list; call with (list . pool). */}}
{{/* The name of a model of the Hub, as commands take it. */}}
{{- define "inflight.hubName" -}}
{{- .repo -}}{{- with .revision -}}@{{ . }}{{- end -}}{{- with .file -}}:{{ . }}{{- end -}}
{{- end -}}

{{- define "inflight.workerArgs" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $source := first $pool.kinds -}}
- worker
- --listen=0.0.0.0:8652
- --metrics-listen=0.0.0.0:8653
- --worker-id=$(POD_NAME)
- {{ printf "--secret-file=/etc/inflight/worker-secret/%s" $root.Values.workerSecret.key | quote }}
- {{ printf "--device=%s" $pool.device | quote }}
- --drain-timeout={{ int $pool.drainSeconds }}s
{{- if ne $source "embedded" }}
{{- $path := (get $pool.model.source $source).path | default "" | trimPrefix "/" }}
{{- if eq $source "hostPath" }}
{{- $path = ternary (base $path) "" (hasSuffix ".gguf" $path) }}
{{- end }}
{{- if eq $source "hub" }}
- {{ printf "--model=%s" (include "inflight.hubName" $pool.model.source.hub) | quote }}
{{- else }}
- {{ printf "--model=/models/%s" $path | trimSuffix "/" | quote }}
{{- end }}
{{- /* A folder of its own: others than the worker can write to the volume's root. */}}
- --fingerprint-cache=/var/cache/inflight/fingerprints
{{- end }}
{{- if gt (int $pool.gpus) 0 }}
- --gemm-cache=/var/cache/inflight/gemm
{{- end }}
{{- with $pool.model.name }}
- {{ printf "--model-name=%s" . | quote }}
{{- end }}
{{- include "inflight.engineArgs" $pool }}
{{- if $root.Values.workerTls.enabled }}
- --tls-cert=/etc/inflight/tls/tls.crt
- --tls-key=/etc/inflight/tls/tls.key
{{- if $root.Values.workerTls.clientCertificates }}
- --tls-client-ca=/etc/inflight/tls/ca.crt
{{- end }}
{{- end }}
{{ include "inflight.telemetryArgs" $root }}
{{- end -}}
