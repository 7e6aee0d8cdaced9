{{/* Keys of other charts and servers that schema and templates know only to refuse them, by the place where they stand. */}}
{{- define "inflight.foreignKeys" -}}
{{- $hub := "hub.tokenSecret of the pool's model.source" -}}
{{- $security := "nothing in its place, as all pods run as user 65532 with a read-only root file system" -}}
{{- $both := "router and poolDefaults (or an entry of pools)" -}}
values:
  replicaCount: router.replicas, and replicas of pools
  replicas: router.replicas, and replicas of pools
  ingress: router.ingress
  httpRoute: router.httpRoute
  grpcRoute: router.grpcRoute
  gateway: router.httpRoute and router.grpcRoute
  service: router.service
  autoscaling: router.autoscaling, and autoscaling of pools
  model: model of an entry of pools
  models: pools
  modelSpec: pools
  modelArtifacts: model.source of an entry of pools
  servingEngineSpec: pools
  routerSpec: router
  decode: pools
  prefill: pools (workers prefill and decode)
  worker: pools
  engine: poolDefaults.engine
  hfToken: {{ $hub | quote }}
  hf_token: {{ $hub | quote }}
  apiKey: router.tenants
  vllmApiKey: router.tenants
  tls: router.tls for clients, workerTls for workers
  imagePullSecrets: image.pullSecrets
  serviceMonitor: monitoring.serviceMonitor
  podMonitor: monitoring.serviceMonitor
  prometheusRule: monitoring.rules
  {{- range list "resources" "nodeSelector" "tolerations" "affinity" "priorityClassName" "schedulerName" "podLabels" "podAnnotations" "extraVolumes" "extraVolumeMounts" "env" "extraArgs" }}
  {{ . }}: {{ . }} of {{ $both }}
  {{- end }}
  runtimeClassName: poolDefaults.runtimeClassName
  volumes: extraVolumes of {{ $both }}
  volumeMounts: extraVolumeMounts of {{ $both }}
  extraEnv: env of {{ $both }}
  topologySpreadConstraints: topologySpread of {{ $both }}
  securityContext: {{ $security | quote }}
  podSecurityContext: {{ $security | quote }}
pool:
  replicaCount: replicas
  replicaNum: replicas
  modelURL: model.source.hub.repo
  modelUri: model.source.hub.repo
  source: model.source
  maxModelLen: engine.maxContextTokens
  maxNumSeqs: engine.maxSequences
  gpuMemoryUtilization: engine.gpuMemoryUtilization
  tensorParallelSize: tensorParallel
  vllmConfig: engine
  requestGPU: "gpusPerWorker, with device: cuda"
  gpus: "gpusPerWorker, with device: cuda"
  requestCPU: resources.requests.cpu
  requestMemory: resources.requests.memory
  limitCPU: resources.limits.cpu
  limitMemory: resources.limits.memory
  hfToken: {{ $hub | quote }}
  hf_token: {{ $hub | quote }}
  pvcStorage: model.source.pvc, or size of model.source.initDownload
  persistence: model.source.pvc, or storageClassName of model.source.initDownload
  extraEnv: env
  envVars: env
  args: extraArgs
  volumes: extraVolumes
  volumeMounts: extraVolumeMounts
  labels: podLabels
  annotations: podAnnotations
  topologySpreadConstraints: topologySpread
  keda: autoscaling.keda
  hpa: autoscaling.hpa
  minReplicas: autoscaling.minReplicas
  maxReplicas: autoscaling.maxReplicas
  startupProbe: loadTimeoutSeconds
engine:
  maxModelLen: maxContextTokens
  maxNumSeqs: maxSequences
  maxNumBatchedTokens: maxBatchTokens
  blockSize: blockTokens
  quantization: quantize
  swapSpace: hostCacheBytes
  enablePrefixCaching: prefixCache
  schedulingPolicy: policy
  tensorParallelSize: tensorParallel of the pool
  tensorParallel: tensorParallel of the pool
  dtype: quantize, or kvCacheDtype for the KV cache
router:
  replicaCount: replicas
  hosts: ingress.hosts
  ingressClassName: ingress.className
  gateway: httpRoute and grpcRoute
  httpPort: service.httpPort
  servicePort: service.port
  serviceType: service.type
  apiKeys: tenants
  extraEnv: env
  volumes: extraVolumes
  volumeMounts: extraVolumeMounts
  labels: podLabels
  annotations: podAnnotations
  topologySpreadConstraints: topologySpread
  strategy: "nothing in its place, as a new router always starts before an old one ends"
  routingLogic: placement
{{- end -}}

{{/* Refuses keys of other charts, all at once. */}}
{{- define "inflight.checkForeign" -}}
{{- $known := include "inflight.foreignKeys" . | fromYaml -}}
{{- $places := list (list "" $known.values .Values) (list "router." $known.router .Values.router) (list "poolDefaults." $known.pool .Values.poolDefaults) -}}
{{- $places = append $places (list "poolDefaults.engine." $known.engine .Values.poolDefaults.engine) -}}
{{- range .Values.pools -}}
{{- $places = append $places (list (printf "pools.%s." .name) $known.pool .) -}}
{{- $places = append $places (list (printf "pools.%s.engine." .name) $known.engine (.engine | default dict)) -}}
{{- end -}}
{{- $faults := list -}}
{{- range $places -}}
{{- $path := index . 0 -}}
{{- $given := index . 2 -}}
{{- range $key, $ours := index . 1 -}}
{{- if hasKey $given $key -}}
{{- $faults = append $faults (printf "%s%s is no value of this chart: use %s" $path $key $ours) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $faults -}}{{- fail (join "\n" .) -}}{{- end -}}
{{- end -}}
