{{/* Flags of a router, a list. */}}
{{- define "inflight.routerArgs" -}}
{{- $router := .Values.router -}}
- router
- --listen=0.0.0.0:8650
{{- if $router.http.enabled }}
- --http-listen=0.0.0.0:8640
{{- if $router.http.metrics }}
- --http-metrics=true
{{- end }}
{{- end }}
- --metrics-listen=0.0.0.0:8651
- --router-id=$(POD_NAME)
- {{ printf "--workers=%s" (include "inflight.workers" .) | quote }}
- --drain-grace={{ int $router.moveAfterSeconds }}s
- --drain-timeout={{ int $router.drainSeconds }}s
{{- with include "inflight.noWorkerTimeout" . }}
- --no-worker-timeout={{ . }}s
{{- end }}
{{- with include "inflight.coldStart" . | fromYaml }}
{{- if .models }}
- {{ printf "--expect-models=%s" (join "," .models) | quote }}
- --cold-start-timeout={{ int .seconds }}s
{{- end }}
{{- end }}
{{- with $router.placement }}
- {{ printf "--placement=%s" . | quote }}
{{- end }}
{{- range $key := list "queueRequestsMax" "queueTokensMax" "defaultMaxTokens" }}
{{- if not (kindIs "invalid" (index $router $key)) }}
- --{{ kebabcase $key }}={{ int64 (index $router $key) }}
{{- end }}
{{- end }}
{{- if $router.tenants.secretName }}
- {{ printf "--tenants-file=/etc/inflight/tenants/%s" $router.tenants.key | quote }}
{{- end }}
- --admin={{ $router.admin }}
{{- if $router.usageLog.enabled }}
- --usage-log=/var/lib/inflight/usage/$(POD_NAME)
- --usage-log-bytes={{ int $router.usageLog.fileMiB }}MiB
- --usage-log-files={{ int $router.usageLog.files }}
- --usage-log-excess={{ $router.usageLog.excess }}
- --usage-log-on-error={{ $router.usageLog.onError }}
{{- end }}
- {{ printf "--worker-secret-file=/etc/inflight/worker-secret/%s" .Values.workerSecret.key | quote }}
- {{ printf "--resume-key-file=/etc/inflight/resume-key/%s" $router.resumeKey.key | quote }}
{{- if $router.tls.enabled }}
- --tls-cert=/etc/inflight/tls/tls.crt
- --tls-key=/etc/inflight/tls/tls.key
{{- if $router.tls.clientCa }}
- --tls-client-ca=/etc/inflight/tls/ca.crt
{{- if $router.tls.clientOptional }}
- --tls-client-optional
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.workerTls.enabled }}
- --worker-tls-ca=/etc/inflight/worker-tls/ca.crt
{{- if .Values.workerTls.clientCertificates }}
- --worker-tls-cert=/etc/inflight/worker-tls/tls.crt
- --worker-tls-key=/etc/inflight/worker-tls/tls.key
{{- end }}
- {{ printf "--worker-tls-name=%s" (include "inflight.workerServerName" .) | quote }}
{{- end }}
{{ include "inflight.telemetryArgs" . }}
{{- end -}}

{{/* Models of pools that may sleep at zero, and how long their requests are held. */}}
{{- define "inflight.coldStart" -}}
{{- $models := list -}}
{{- $seconds := 0 -}}
{{- range include "inflight.pools" . | fromYamlArray -}}
{{- if and .autoscaled (eq (int .least) 0) -}}
{{- $models = append $models .model.name -}}
{{- /* A node may have to start, too. */ -}}
{{- $seconds = max $seconds (add .loadTimeoutSeconds 300) -}}
{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" .Values.router.coldStartTimeoutSeconds) -}}{{- $seconds = .Values.router.coldStartTimeoutSeconds -}}{{- end -}}
{{- dict "models" ($models | uniq | sortAlpha) "seconds" (int64 $seconds) | toYaml -}}
{{- end -}}

{{/*
How long a model may be without workers, in seconds; empty: the program's default. The requests of a pool of one wait while its worker is
replaced.
*/}}
{{- define "inflight.noWorkerTimeout" -}}
{{- $replacement := 0 -}}
{{- range include "inflight.pools" . | fromYamlArray -}}
{{- if eq (int .least) 1 -}}{{- $replacement = max $replacement (add .loadTimeoutSeconds 60) -}}{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" .Values.router.noWorkerTimeoutSeconds) -}}
{{- int64 .Values.router.noWorkerTimeoutSeconds -}}
{{- else if gt (int $replacement) 0 -}}
{{- int $replacement -}}
{{- end -}}
{{- end -}}

{{/* Secrets that a router mounts, as a list of name and secret. */}}
{{- define "inflight.routerSecrets" -}}
{{- range $name, $secret := dict "tenants" .Values.router.tenants.secretName "resume-key" (include "inflight.resumeKeySecret" .) "worker-secret" (include "inflight.workerSecret" .) "tls" (include "inflight.routerTlsSecret" .) "worker-tls" (include "inflight.routerClientTlsSecret" .) }}
{{- if $secret }}
- { name: {{ $name | quote }}, secret: {{ $secret | quote }} }
{{- end }}
{{- end }}
{{- end -}}
