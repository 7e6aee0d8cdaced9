{{/* Contradictions between values, which a schema cannot see. Each sentence names the value and the remedy. */}}
{{- define "inflight.checks" -}}
{{- $root := . -}}
{{- $router := .Values.router -}}
{{- $seen := dict -}}
{{- include "inflight.checkForeign" . -}}
{{- include "inflight.checkTag" (list "image.tag" .Values.image.tag) -}}
{{- if not (coalesce .Values.image.tag .Chart.AppVersion) -}}
{{- fail "image.tag is empty, and the chart has no appVersion to take its place: give the tag of the image" -}}
{{- end -}}
{{- include "inflight.checkRouter" . -}}
{{- include "inflight.checkTls" . -}}
{{- include "inflight.checkExposure" . -}}
{{- include "inflight.checkPod" (list "router" $router list) -}}
{{- $total := 0 -}}
{{- range $pool := include "inflight.pools" . | fromYamlArray -}}
{{- $at := printf "pools.%s" $pool.name -}}
{{- if hasKey $seen $pool.name -}}
{{- fail (printf "pools: two are named %s, which names their StatefulSet and service: give each pool a name of its own" $pool.name) -}}
{{- end -}}
{{- $_ := set $seen $pool.name true -}}
{{- if has $pool.name (list "router" "router-metrics") -}}
{{- fail (printf "pools: the name %s is that of a service of the routers: give the pool another name" $pool.name) -}}
{{- end -}}
{{- if gt (len $pool.fullName) 52 -}}
{{- fail (printf "%s: the name %s has more than 52 characters, and names of its pods would be too long: shorten the pool's name or set fullnameOverride" $at $pool.fullName) -}}
{{- end -}}
{{- include "inflight.checkSource" (list $root $pool $at) -}}
{{- include "inflight.checkDevice" (list $pool $at) -}}
{{- include "inflight.checkPod" (list $at $pool $pool.kinds) -}}
{{- include "inflight.checkTag" (list (printf "%s.image.tag" $at) $pool.image.tag) -}}
{{- if le (int $pool.drainSeconds) (int $router.moveAfterSeconds) -}}
{{- fail (printf "%s.drainSeconds: %d leaves no time to move streams, which begin to move after router.moveAfterSeconds: %d: raise the one or lower the other" $at (int $pool.drainSeconds) (int $router.moveAfterSeconds)) -}}
{{- end -}}
{{- include "inflight.checkGrace" (list $at $pool.terminationGracePeriodSeconds (int $pool.drainSeconds) "drainSeconds") -}}
{{- include "inflight.checkScaling" (list $root $pool $at) -}}
{{- include "inflight.checkBudget" (list $at $pool.podDisruptionBudget $pool.least) -}}
{{- $total = add $total $pool.most -}}
{{- end -}}
{{- if and (eq (int $total) 0) (eq $router.discovery "static") -}}
{{- fail "pools: all have replicas: 0, and with router.discovery: static the routers would have no address of a worker: give one a replica, or set router.discovery to kubernetes or dns" -}}
{{- end -}}
{{- end -}}

{{- define "inflight.checkTag" -}}
{{- if eq (index . 1 | toString) "latest" -}}
{{- fail (printf "%s: latest names no version, so pods could run different ones: give the tag of a release" (index . 0)) -}}
{{- end -}}
{{- end -}}

{{/* An image that is given whole must have a tag or a digest; call with (list path image). */}}
{{- define "inflight.checkImage" -}}
{{- $path := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := last (splitList "/" $image) -}}
{{- if not (or (contains "@sha256:" $image) (contains ":" $name)) -}}
{{- fail (printf "%s: %s has no tag: give one, or a digest" $path $image) -}}
{{- end -}}
{{- if hasSuffix ":latest" $name -}}{{- include "inflight.checkTag" (list $path "latest") -}}{{- end -}}
{{- end -}}

{{- define "inflight.checkSource" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $at := printf "%s.model.source" (index . 2) -}}
{{- $choice := "exactly one of embedded, hub, pvc, hostPath, image, initDownload" -}}
{{- if eq (len $pool.kinds) 0 -}}
{{- fail (printf "%s names no source of the model: give %s" $at $choice) -}}
{{- end -}}
{{- if gt (len $pool.kinds) 1 -}}
{{- fail (printf "%s has %s: give %s" $at (join " and " $pool.kinds) $choice) -}}
{{- end -}}
{{- with $pool.model.source.image -}}
{{- include "inflight.checkImage" (list (printf "%s.image.reference" $at) .reference) -}}
{{- /* Not below the chart's own minimum: there it is linted by a Helm that knows no cluster. */ -}}
{{- if semverCompare ">=1.30.0-0, <1.33.0-0" $root.Capabilities.KubeVersion.Version -}}
{{- fail (printf "%s.image: volumes of images need Kubernetes 1.33, and this is %s: use hub or pvc" $at $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- with $pool.model.source.hub -}}
{{- if not (or .cache .size) -}}
{{- fail (printf "%s.hub: where is the model kept? Give cache.claimName, a claim that workers share, or size, of a volume for each worker" $at) -}}
{{- end -}}
{{- if and .cache .size -}}
{{- fail (printf "%s.hub: size is of a volume for each worker, and cache.claimName is a claim: give one of them" $at) -}}
{{- end -}}
{{- end -}}
{{- with $pool.model.source.initDownload -}}
{{- include "inflight.checkImage" (list (printf "%s.initDownload.image" $at) .image) -}}
{{- end -}}
{{- end -}}

{{- define "inflight.checkDevice" -}}
{{- $pool := index . 0 -}}
{{- $at := index . 1 -}}
{{- $engine := $pool.engine -}}
{{- $cuda := eq $pool.device "cuda" -}}
{{- range $part := list "requests" "limits" -}}
{{- if hasKey (get $pool.resources $part | default dict) $pool.gpuResource -}}
{{- fail (printf "%s.resources.%s has %s: the chart sets it from gpusPerWorker; remove it, and set gpusPerWorker with device: cuda" $at $part $pool.gpuResource) -}}
{{- end -}}
{{- end -}}
{{- if and (not $cuda) (gt (int $pool.gpusPerWorker) 0) -}}
{{- fail (printf "%s.gpusPerWorker: %d on device: %s, which uses none: set device: cuda, or remove gpusPerWorker" $at (int $pool.gpusPerWorker) $pool.device) -}}
{{- end -}}
{{- if and $cuda (eq (toString $pool.gpusPerWorker) "0") -}}
{{- fail (printf "%s.gpusPerWorker: 0 on device: cuda, which needs at least one: raise it, or set device: cpu" $at) -}}
{{- end -}}
{{- if and $cuda (ne (int $pool.ranks) (int $pool.gpus)) -}}
{{- fail (printf "%s.tensorParallel: %d and gpusPerWorker: %d: each rank has one GPU, so make them equal or leave one out" $at (int $pool.ranks) (int $pool.gpus)) -}}
{{- end -}}
{{- range $key := ternary (list "kvCacheBytes" "quantize") (list "gpuMemoryUtilization") $cuda -}}
{{- if not (kindIs "invalid" (index $engine $key)) -}}
{{- fail (printf "%s.engine.%s has no effect on device: %s: remove it%s" $at $key $pool.device (ternary ", and size the KV cache by gpuMemoryUtilization" "" (and $cuda (eq $key "kvCacheBytes")))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Call with (list path grace time what). */}}
{{- define "inflight.checkGrace" -}}
{{- $grace := index . 1 -}}
{{- if not (kindIs "invalid" $grace) -}}
{{- if lt (int $grace) (int (add 5 (index . 2))) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d would kill the process in its drain: it must exceed %s, %d s, by 5 s or more; leave it out to have it computed" (index . 0) (int $grace) (index . 3) (int (index . 2))) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Call with (list path budget least). */}}
{{- define "inflight.checkBudget" -}}
{{- $at := printf "%s.podDisruptionBudget" (index . 0) -}}
{{- $budget := index . 1 -}}
{{- $least := int (index . 2) -}}
{{- if $budget.enabled -}}
{{- if not (or (kindIs "invalid" $budget.minAvailable) (kindIs "invalid" $budget.maxUnavailable)) -}}
{{- fail (printf "%s has minAvailable and maxUnavailable: Kubernetes takes one, so remove the other" $at) -}}
{{- end -}}
{{- if and (not (kindIs "invalid" $budget.minAvailable)) (not (kindIs "string" $budget.minAvailable)) -}}
{{- if and (gt (int $budget.minAvailable) 0) (ge (int $budget.minAvailable) $least) -}}
{{- fail (printf "%s.minAvailable: %d of %d replicas lets no pod be evicted, so nodes could not be drained: lower it, raise the replicas, or use maxUnavailable" $at (int $budget.minAvailable) $least) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels and volumes of a pod beside the chart's; call with (list path component-values kinds-of-sources). */}}
{{- define "inflight.checkPod" -}}
{{- $at := index . 0 -}}
{{- $component := index . 1 -}}
{{- range $label := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "inflight/pool" -}}
{{- if hasKey $component.podLabels $label -}}
{{- fail (printf "%s.podLabels has %s, by which the chart selects the pods: remove it, or use another label" $at $label) -}}
{{- end -}}
{{- end -}}
{{- $own := list "tenants" "resume-key" "worker-secret" "tls" "worker-tls" "usage" "model" "download" "cache" "shared-memory" -}}
{{- $names := dict -}}
{{- range $component.extraVolumes -}}
{{- if has .name $own -}}
{{- fail (printf "%s.extraVolumes: %s is the name of a volume of the chart: give it another name" $at .name) -}}
{{- end -}}
{{- if hasKey $names .name -}}
{{- fail (printf "%s.extraVolumes: two volumes are named %s: give each a name of its own" $at .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- $paths := list "/etc/inflight" "/models" "/var/cache/inflight" "/var/lib/inflight/usage" -}}
{{- if gt (int $component.gpus) 1 -}}{{- $paths = append $paths "/dev/shm" -}}{{- end -}}
{{- if has "initDownload" (index . 2) -}}{{- $paths = append $paths "/tmp" -}}{{- end -}}
{{- $seen := dict -}}
{{- range $component.extraVolumeMounts -}}
{{- if not (hasKey $names .name) -}}
{{- fail (printf "%s.extraVolumeMounts: %s is no volume of %s.extraVolumes: add it there, or correct the name" $at .name $at) -}}
{{- end -}}
{{- $path := trimSuffix "/" .mountPath -}}
{{- if or (has $path $paths) (hasPrefix "/etc/inflight/" $path) (hasKey $seen $path) -}}
{{- fail (printf "%s.extraVolumeMounts: something else is mounted at %s: mount %s at another path" $at .mountPath .name) -}}
{{- end -}}
{{- $_ := set $seen $path true -}}
{{- end -}}
{{- end -}}

{{- define "inflight.checkScaling" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $at := index . 2 -}}
{{- $scaling := $pool.autoscaling -}}
{{- if $pool.autoscaled -}}
{{- if not (kindIs "invalid" $pool.replicas) -}}
{{- fail (printf "%s.replicas: %d beside autoscaling.type: %s: remove replicas, and set autoscaling.minReplicas and maxReplicas" $at (int $pool.replicas) $scaling.type) -}}
{{- end -}}
{{- if gt (int $pool.least) (int $pool.most) -}}
{{- fail (printf "%s.autoscaling: minReplicas: %d exceeds maxReplicas: %d: swap or change them" $at (int $pool.least) (int $pool.most)) -}}
{{- end -}}
{{- if eq $root.Values.router.discovery "static" -}}
{{- fail (printf "%s.autoscaling changes the number of workers, which router.discovery: static fixes: set router.discovery to kubernetes or dns" $at) -}}
{{- end -}}
{{- end -}}
{{- if eq $scaling.type "keda" -}}
{{- if not $scaling.keda.prometheus -}}
{{- fail (printf "%s.autoscaling.keda.prometheus is empty: give the address of Prometheus' HTTP API, such as http://prometheus.monitoring:9090" $at) -}}
{{- end -}}
{{- if not $pool.model.name -}}
{{- fail (printf "%s.model.name is empty: autoscaling by KEDA counts the requests of a model by its name, so give it" $at) -}}
{{- end -}}
{{- $hold := $root.Values.router.coldStartTimeoutSeconds -}}
{{- if and (eq (int $pool.least) 0) (not (kindIs "invalid" $hold)) -}}
{{- if le (int64 $hold) (int64 $pool.loadTimeoutSeconds) -}}
{{- fail (printf "router.coldStartTimeoutSeconds: %d does not exceed %s.loadTimeoutSeconds, so requests would fail before the pool has woken: raise it, or leave it out" (int64 $hold) $at) -}}
{{- end -}}
{{- end -}}
{{- else if eq $scaling.type "hpa" -}}
{{- if eq (int $pool.least) 0 -}}
{{- fail (printf "%s.autoscaling: a HorizontalPodAutoscaler does not scale from zero: set minReplicas to 1 or more, or type to keda" $at) -}}
{{- end -}}
{{- if not $scaling.hpa.metrics -}}
{{- if eq $pool.device "cuda" -}}
{{- fail (printf "%s.autoscaling.type: hpa scales on the use of CPUs, which says nothing about GPUs: set type to keda, or give hpa.metrics" $at) -}}
{{- end -}}
{{- if not (($pool.resources.requests | default dict).cpu) -}}
{{- fail (printf "%s.autoscaling.type: hpa compares the use of CPUs with resources.requests.cpu, which is missing: give it" $at) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "inflight.checkRouter" -}}
{{- $router := .Values.router -}}
{{- $scaling := $router.autoscaling -}}
{{- if $scaling.enabled -}}
{{- if not (kindIs "invalid" $router.replicas) -}}
{{- fail (printf "router.replicas: %d beside router.autoscaling.enabled: remove replicas, and set autoscaling.minReplicas and maxReplicas" (int $router.replicas)) -}}
{{- end -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "router.autoscaling: minReplicas: %d exceeds maxReplicas: %d: swap or change them" (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- if not (($router.resources.requests | default dict).cpu) -}}
{{- fail "router.autoscaling compares the use of CPUs with router.resources.requests.cpu, which is missing: give it" -}}
{{- end -}}
{{- end -}}
{{- $least := ternary $scaling.minReplicas (ternary 1 $router.replicas (kindIs "invalid" $router.replicas)) $scaling.enabled -}}
{{- include "inflight.checkBudget" (list "router" $router.podDisruptionBudget $least) -}}
{{- include "inflight.checkGrace" (list "router" $router.terminationGracePeriodSeconds (add $router.preStopSeconds $router.drainSeconds) "preStopSeconds and drainSeconds together") -}}
{{- if and $router.usageLog.claimName (not $router.usageLog.enabled) -}}
{{- fail "router.usageLog has a claimName, but is off: set router.usageLog.enabled to true, or remove it" -}}
{{- end -}}
{{- if and $router.http.metrics (not $router.http.enabled) -}}
{{- fail "router.http.metrics needs the HTTP port: set router.http.enabled to true, or http.metrics to false" -}}
{{- end -}}
{{- if eq (int $router.service.port) (int $router.service.httpPort) -}}
{{- fail (printf "router.service: port and httpPort are both %d: give the two protocols ports of their own" (int $router.service.port)) -}}
{{- end -}}
{{- end -}}

{{- define "inflight.checkTls" -}}
{{- $tls := .Values.router.tls -}}
{{- $issuer := $tls.certManager.issuer.name -}}
{{- if $tls.enabled -}}
{{- if and $tls.secretName $issuer -}}
{{- fail "router.tls has secretName and certManager.issuer: the certificate comes from one of them, so remove the other" -}}
{{- end -}}
{{- if not (or $tls.secretName $issuer) -}}
{{- fail "router.tls.enabled needs a certificate: give router.tls.secretName, or router.tls.certManager.issuer.name" -}}
{{- end -}}
{{- else if or $tls.secretName $issuer $tls.clientCa -}}
{{- fail "router.tls has a certificate or clientCa, but is off: set router.tls.enabled to true, or remove them" -}}
{{- end -}}
{{- if and .Values.test.clientCertificate (not $tls.enabled) -}}
{{- fail "test.clientCertificate needs router.tls.enabled: set it, or remove the certificate" -}}
{{- end -}}
{{- $workers := .Values.workerTls -}}
{{- $given := or $workers.secretName $workers.routerSecretName -}}
{{- if $workers.enabled -}}
{{- if and $given $workers.issuer.name -}}
{{- fail "workerTls has Secrets and an issuer: the certificates come from one of them, so remove the other" -}}
{{- end -}}
{{- if not (or $workers.issuer.name (and $workers.secretName $workers.routerSecretName)) -}}
{{- fail "workerTls.enabled needs certificates: give workerTls.secretName and workerTls.routerSecretName, or workerTls.issuer.name" -}}
{{- end -}}
{{- else if or $given $workers.issuer.name -}}
{{- fail "workerTls has certificates, but is off: set workerTls.enabled to true, or remove them" -}}
{{- end -}}
{{- end -}}
