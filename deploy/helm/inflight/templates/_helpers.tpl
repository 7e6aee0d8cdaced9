{{/* Names. A pod of a StatefulSet has its name, a number and in one label a hash, and a label has 63 characters. */}}
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

{{/* The service account of the routers: one of their own where they watch the workers' endpoints. */}}
{{- define "inflight.routerAccountName" -}}
{{- if eq .Values.router.discovery "kubernetes" -}}
{{- printf "%s-router" (include "inflight.fullname" .) -}}
{{- else -}}
{{- include "inflight.serviceAccountName" . -}}
{{- end -}}
{{- end -}}

{{/* Labels that select a component's pods; call with (list . "router") or (list . "worker" POOL). */}}
{{- define "inflight.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 | quote }}
{{- if gt (len .) 2 }}
inflight/pool: {{ (index . 2).name | quote }}
{{- end }}
{{- end -}}

{{- define "inflight.labels" -}}
{{- $root := index . 0 -}}
{{ include "inflight.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{/* The image; call with (list . overrides), where the overrides of a pool may be empty. */}}
{{- define "inflight.image" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 -}}
{{- $tag := coalesce $own.tag $root.Values.image.tag $root.Chart.AppVersion -}}
{{ printf "%s:%s" (coalesce $own.repository $root.Values.image.repository) $tag | quote }}
{{- end -}}

{{/* Name of the Secret with the resume keys. */}}
{{- define "inflight.resumeKeySecret" -}}
{{- .Values.router.resumeKey.secretName | default (printf "%s-resume-key" (include "inflight.fullname" .)) -}}
{{- end -}}

{{/* Name of the Secret with the secret of routers and workers. */}}
{{- define "inflight.workerSecret" -}}
{{- .Values.workerSecret.secretName | default (printf "%s-worker-secret" (include "inflight.fullname" .)) -}}
{{- end -}}

{{/* Names of the Secrets for TLS: given ones, or those that cert-manager fills. Empty without TLS. */}}
{{- define "inflight.routerTlsSecret" -}}
{{- if .Values.router.tls.enabled -}}
{{- .Values.router.tls.secretName | default (printf "%s-router-tls" (include "inflight.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{- define "inflight.workerTlsSecret" -}}
{{- if .Values.workerTls.enabled -}}
{{- .Values.workerTls.secretName | default (printf "%s-worker-tls" (include "inflight.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{- define "inflight.routerClientTlsSecret" -}}
{{- if .Values.workerTls.enabled -}}
{{- .Values.workerTls.routerSecretName | default (printf "%s-router-client-tls" (include "inflight.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{- define "inflight.workerServerName" -}}
{{- .Values.workerTls.serverName | default (printf "%s-workers" (include "inflight.fullname" .)) -}}
{{- end -}}

{{/* Flags of both programs for telemetry, a list. */}}
{{- define "inflight.telemetryArgs" -}}
- {{ printf "--log=%s" .Values.telemetry.log | quote }}
- --log-format=json
{{- with .Values.telemetry.otlpEndpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
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
# A volume that has the group already is not searched file by file at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "inflight.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods may run; call with (list . component-values selector). */}}
{{- define "inflight.scheduling" -}}
{{- $values := index . 1 -}}
{{- $selector := index . 2 -}}
# Kubernetes would make variables of the services' names, which begin as those that the program reads.
enableServiceLinks: false
{{- with (index . 0).Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey | quote }}
    maxSkew: {{ .maxSkew }}
    whenUnsatisfiable: {{ .whenUnsatisfiable | quote }}
    # In a rolling update the pods that go would count, too, and all new ones could meet on one node. StatefulSets lack the label.
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels: {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Annotations of pods; call with (list . component port). */}}
{{- define "inflight.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- if and $root.Values.telemetry.scrapeAnnotations (not $root.Values.monitoring.serviceMonitor.enabled) }}
prometheus.io/scrape: "true"
prometheus.io/path: /metrics
prometheus.io/port: {{ index . 2 | quote }}
{{- end }}
{{- with $component.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The spec of a PodDisruptionBudget but for its selector; call with the budget. */}}
{{- define "inflight.budget" -}}
{{- if not (kindIs "invalid" .minAvailable) -}}
minAvailable: {{ .minAvailable }}
{{- else if not (kindIs "invalid" .maxUnavailable) -}}
maxUnavailable: {{ .maxUnavailable }}
{{- else -}}
maxUnavailable: 1
{{- end }}
# A pod that does not get ready serves nobody and must not keep its node from being drained.
unhealthyPodEvictionPolicy: AlwaysAllow
{{- end -}}

{{/* Behaviour of a HorizontalPodAutoscaler: up at once, down slowly; call with scaleDown. */}}
{{- define "inflight.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - { type: Percent, value: 100, periodSeconds: 30 }
    - { type: Pods, value: 4, periodSeconds: 30 }
scaleDown:
  stabilizationWindowSeconds: {{ .stabilizationSeconds }}
  policies:
    - { type: Pods, value: {{ .pods }}, periodSeconds: {{ .periodSeconds }} }
{{- end -}}

{{/* Appends further flags to those of the chart, without doubles; call with (list args extra path). Both are YAML lists. */}}
{{- define "inflight.args" -}}
{{- $args := index . 0 | fromYamlArray -}}
{{- $path := index . 2 -}}
{{- $known := dict -}}
{{- range $args -}}{{- $_ := set $known (regexFind "^--[a-z-]+" .) true -}}{{- end -}}
{{- range index . 1 -}}
{{- $flag := regexFind "^--[a-z-]+" . -}}
{{- if hasKey $known $flag -}}
{{- fail (printf "%s: the chart sets %s already, and the program refuses a flag given twice; use the value of the chart for it" $path $flag) -}}
{{- end -}}
{{- $args = append $args . -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}
