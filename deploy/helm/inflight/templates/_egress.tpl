{{/* Rules for outgoing connections, each a list. */}}

{{/* One rule; call with (list peers ports), ports as a YAML list. Without peers: everywhere. */}}
{{- define "inflight.egressRule" -}}
- ports: {{- index . 1 | nindent 4 }}
  {{- with index . 0 }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Ports of TCP, a YAML list. */}}
{{- define "inflight.tcpPorts" -}}
{{- range . }}
- { port: {{ int . }}, protocol: TCP }
{{- end }}
{{- end -}}

{{/* Name servers. Some clusters' pods of them listen at 5353, behind a service at 53. */}}
{{- define "inflight.dnsEgress" -}}
{{- $ports := list -}}
{{- range $port := list 53 5353 -}}
{{- range $protocol := list "UDP" "TCP" -}}
{{- $ports = append $ports (dict "port" $port "protocol" $protocol) -}}
{{- end -}}
{{- end -}}
{{- include "inflight.egressRule" (list .Values.networkPolicy.egress.dns (toYaml $ports)) -}}
{{- end -}}

{{/* Port of the collector; that of http where the endpoint has none. */}}
{{- define "inflight.otlpEgress" -}}
{{- with .Values.telemetry.otlpEndpoint -}}
{{- $port := regexFind ":[0-9]+$" (regexReplaceAll "^http://([^/]*).*$" . "${1}") | trimPrefix ":" | default "80" -}}
{{- include "inflight.egressRule" (list $.Values.networkPolicy.egress.otlp (include "inflight.tcpPorts" (list $port))) -}}
{{- end -}}
{{- end -}}

{{- define "inflight.workerEgress" -}}
{{- if .Values.telemetry.otlpEndpoint }}
{{ include "inflight.dnsEgress" . }}
{{ include "inflight.otlpEgress" . }}
{{- end }}
{{- with .Values.networkPolicy.egress.extraWorker }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "inflight.downloadEgress" -}}
{{- $egress := .Values.networkPolicy.egress -}}
{{ include "inflight.dnsEgress" . }}
{{ include "inflight.egressRule" (list $egress.downloads (include "inflight.tcpPorts" $egress.downloadPorts)) }}
{{- end -}}

{{- define "inflight.routerEgress" -}}
{{- $egress := .Values.networkPolicy.egress -}}
- ports: [{ port: grpc, protocol: TCP }]
  to:
    - podSelector:
        matchLabels: {{- include "inflight.selector" (list . "worker") | nindent 10 }}
{{ include "inflight.dnsEgress" . }}
{{- if eq .Values.router.discovery "kubernetes" }}
{{ include "inflight.egressRule" (list $egress.apiServer (include "inflight.tcpPorts" $egress.apiServerPorts)) }}
{{- end }}
{{- if .Values.telemetry.otlpEndpoint }}
{{ include "inflight.otlpEgress" . }}
{{- end }}
{{- with $egress.extraRouter }}
{{ toYaml . }}
{{- end }}
{{- end -}}
