{{/* Names. Pods of the StatefulSet add a number, and a DNS label has 63 characters. */}}
{{- define "inflight.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "inflight.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "inflight.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels of a component; call with (list . "router"). */}}
{{- define "inflight.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "inflight.labels" -}}
{{- $root := index . 0 -}}
{{ include "inflight.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "inflight.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
{{- end -}}

{{/* The service account of the routers: one of their own where they watch the workers' endpoints. */}}
{{- define "inflight.routerAccountName" -}}
{{- if eq .Values.router.discovery "kubernetes" -}}
{{- printf "%s-router" (include "inflight.fullname" .) -}}
{{- else -}}
{{- include "inflight.serviceAccountName" . -}}
{{- end -}}
{{- end -}}

{{/* Where the routers find the workers: the host names that a StatefulSet keeps over restarts, or the service's endpoints. */}}
{{- define "inflight.workers" -}}
{{- $name := printf "%s-worker" (include "inflight.fullname" .) -}}
{{- if eq .Values.router.discovery "kubernetes" -}}
{{- printf "kubernetes://%s/%s:8652" .Release.Namespace $name -}}
{{- else -}}
{{- $workers := list -}}
{{- range $number := until (int .Values.worker.replicas) -}}
{{- $workers = append $workers (printf "%s-%d.%s.%s.svc:8652" $name $number $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $workers -}}
{{- end -}}
{{- end -}}

{{/* The one source of the model; more or less than one is an error. */}}
{{- define "inflight.source" -}}
{{- $kinds := list -}}
{{- range $kind, $fields := .Values.model.source -}}
{{- if not (kindIs "invalid" $fields) -}}{{- $kinds = append $kinds $kind -}}{{- end -}}
{{- end -}}
{{- if gt (len $kinds) 1 -}}{{- $kinds = without $kinds "embedded" -}}{{- end -}}
{{- if ne (len $kinds) 1 -}}
{{- fail "model.source: give exactly one of embedded, pvc, hostPath" -}}
{{- end -}}
{{- first $kinds -}}
{{- end -}}

{{- define "inflight.telemetryArgs" -}}
- --log={{ .Values.telemetry.log }}
- --log-format=json
{{- with .Values.telemetry.otlpEndpoint }}
- --otlp-endpoint={{ . }}
- --otlp-sample-ratio={{ $.Values.telemetry.sampleRatio }}
- --otlp-signals={{ join "," $.Values.telemetry.otlpSignals }}
{{- end }}
{{- with .Values.telemetry.metricsCompat }}
- --metrics-compat={{ . }}
{{- end }}
{{- end -}}

{{- define "inflight.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "inflight.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods may run; call with the component's values. */}}
{{- define "inflight.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A probe by gRPC, or where TLS is on, which probes do not speak, by HTTP; call with (list tls port service metricsPort path). */}}
{{- define "inflight.probe" -}}
{{- if index . 0 -}}
httpGet: { port: {{ index . 3 }}, path: {{ index . 4 }} }
{{- else if index . 2 -}}
grpc: { port: {{ index . 1 }}, service: {{ index . 2 }} }
{{- else -}}
grpc: { port: {{ index . 1 }} }
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the resume keys. */}}
{{- define "inflight.resumeKeySecret" -}}
{{- .Values.router.resumeKey.secretName | default (printf "%s-resume-key" (include "inflight.fullname" .)) -}}
{{- end -}}

{{/* Name of the Secret with the secret of routers and workers. */}}
{{- define "inflight.workerSecret" -}}
{{- .Values.workerSecret.secretName | default (printf "%s-worker-secret" (include "inflight.fullname" .)) -}}
{{- end -}}

{{/* Secrets that a router mounts, as a list of name and secret. */}}
{{- define "inflight.routerSecrets" -}}
{{- range $name, $secret := dict "tenants" .Values.router.tenants.secretName "resume-key" (include "inflight.resumeKeySecret" .) "worker-secret" (include "inflight.workerSecret" .) "tls" .Values.router.tls.secretName "worker-tls" .Values.router.workerTls.secretName }}
{{- if $secret }}
- { name: {{ $name }}, secret: {{ $secret }} }
{{- end }}
{{- end }}
{{- end -}}

{{/* Annotations of pods; call with (list . component port). */}}
{{- define "inflight.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- if $root.Values.telemetry.scrapeAnnotations }}
prometheus.io/scrape: "true"
prometheus.io/path: /metrics
prometheus.io/port: {{ index . 2 | quote }}
{{- end }}
{{- with $component.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What a worker's pod asks for: with GPUs, one for each rank that shares the model. */}}
{{- define "inflight.workerResources" -}}
{{- $resources := deepCopy .Values.worker.resources -}}
{{- $limits := default dict $resources.limits -}}
{{- if or (eq .Values.worker.device "cuda") (and (eq .Values.worker.device "auto") (hasKey $limits "nvidia.com/gpu")) -}}
{{- $gpus := int (default 1 .Values.worker.tensorParallel) -}}
{{- $given := default $gpus (get $limits "nvidia.com/gpu") -}}
{{- if ne (int $given) $gpus -}}
{{- fail (printf "worker.resources.limits has %v nvidia.com/gpu, and worker.tensorParallel takes %d" $given $gpus) -}}
{{- end -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" $gpus) $limits) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Whether a worker's ranks are several GPUs. */}}
{{- define "inflight.severalGpus" -}}
{{- if and (ne .Values.worker.device "cpu") (gt (int (default 1 .Values.worker.tensorParallel)) 1) -}}true{{- end -}}
{{- end -}}
