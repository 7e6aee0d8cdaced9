{{/* Ports of routers to which an Ingress or a route leads, by name, a YAML list. */}}
{{- define "inflight.exposedPorts" -}}
{{- $router := .Values.router -}}
{{- $ports := list -}}
{{- if or $router.grpcRoute.enabled (and $router.ingress.enabled $router.ingress.grpc.enabled) -}}
{{- $ports = append $ports "grpc" -}}
{{- end -}}
{{- if and $router.http.enabled (or $router.httpRoute.enabled $router.ingress.enabled) -}}
{{- $ports = append $ports "http" -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end -}}

{{/* Annotations of the routers' service: those given and, for Traefik, the protocol of both its ports, which take HTTP/2. */}}
{{- define "inflight.serviceAnnotations" -}}
{{- $router := .Values.router -}}
{{- $annotations := dict -}}
{{- if and $router.ingress.enabled (eq $router.ingress.controller "traefik") -}}
{{- $_ := set $annotations "traefik.ingress.kubernetes.io/service.serversscheme" (ternary "https" "h2c" $router.tls.enabled) -}}
{{- end -}}
{{- merge (deepCopy $router.service.annotations) $annotations | toYaml -}}
{{- end -}}

{{/* Annotations of an Ingress: those given before the controller's; call with (list . annotations protocol), protocol HTTP or GRPC. */}}
{{- define "inflight.ingressAnnotations" -}}
{{- $router := (index . 0).Values.router -}}
{{- $annotations := dict -}}
{{- if eq $router.ingress.controller "ingress-nginx" -}}
{{- $prefix := "nginx.ingress.kubernetes.io" -}}
{{- $_ := set $annotations (printf "%s/backend-protocol" $prefix) (ternary (printf "%sS" (index . 2)) (index . 2) $router.tls.enabled) -}}
{{- $_ := set $annotations (printf "%s/proxy-body-size" $prefix) "0" -}}
{{- $_ := set $annotations (printf "%s/proxy-buffering" $prefix) "off" -}}
{{- range $kind := list "read" "send" -}}
{{- $_ := set $annotations (printf "%s/proxy-%s-timeout" $prefix $kind) "3600" -}}
{{- end -}}
{{- end -}}
{{- merge (deepCopy (index . 1)) $annotations | toYaml -}}
{{- end -}}

{{/* An Ingress; call with a dictionary of root, name, values (annotations, hosts, tlsSecretName), protocol, paths and port. */}}
{{- define "inflight.ingress" -}}
{{- $ingress := .root.Values.router.ingress -}}
{{- $service := printf "%s-router" (include "inflight.fullname" .root) -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ .name | quote }}
  labels: {{- include "inflight.labels" (list .root "router") | nindent 4 }}
  {{- with include "inflight.ingressAnnotations" (list .root .values.annotations .protocol) | fromYaml }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $ingress.className }}
  ingressClassName: {{ . | quote }}
  {{- end }}
  {{- with .values.tlsSecretName }}
  tls:
    - secretName: {{ . | quote }}
      {{- with $.values.hosts }}
      hosts: {{- toYaml . | nindent 8 }}
      {{- end }}
  {{- end }}
  rules:
    {{- range $host := .values.hosts | default (list "") }}
    - {{ with $host }}host: {{ . | quote }}
      {{ end }}http:
        paths:
          {{- range $.paths }}
          - path: {{ . | quote }}
            pathType: Prefix
            backend:
              service: { name: {{ $service | quote }}, port: { name: {{ $.port }} } }
          {{- end }}
    {{- end }}
{{- end -}}

{{/* What a route has beside its rules; call with (list . kind values). */}}
{{- define "inflight.route" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
apiVersion: gateway.networking.k8s.io/v1
kind: {{ index . 1 }}
metadata:
  name: {{ printf "%s-router" (include "inflight.fullname" $root) | quote }}
  labels: {{- include "inflight.labels" (list $root "router") | nindent 4 }}
  {{- with $values.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  parentRefs: {{- toYaml $values.parentRefs | nindent 4 }}
  {{- with $values.hostnames }}
  hostnames: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "inflight.checkExposure" -}}
{{- $router := .Values.router -}}
{{- $ingress := $router.ingress -}}
{{- if not $ingress.enabled -}}
{{- if or $ingress.hosts $ingress.tlsSecretName $ingress.grpc.enabled $ingress.grpc.hosts -}}
{{- fail "router.ingress has hosts, a Secret or grpc, but is off: set router.ingress.enabled to true, or remove them" -}}
{{- end -}}
{{- else -}}
{{- if not (or $router.http.enabled $ingress.grpc.enabled) -}}
{{- fail "router.ingress leads to the HTTP port, which is off: set router.http.enabled or router.ingress.grpc.enabled to true" -}}
{{- end -}}
{{- if and $ingress.grpc.enabled $router.http.enabled -}}
{{- if not (and $ingress.hosts $ingress.grpc.hosts) -}}
{{- fail "router.ingress: the HTTP port and the gRPC port need host names to be told apart: give router.ingress.hosts and router.ingress.grpc.hosts" -}}
{{- end -}}
{{- range $ingress.grpc.hosts -}}
{{- if has . $ingress.hosts -}}
{{- fail (printf "router.ingress: %s is among hosts and among grpc.hosts: give the two ports host names of their own" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $router.httpRoute.enabled (not $router.http.enabled) -}}
{{- fail "router.httpRoute leads to the HTTP port, which is off: set router.http.enabled to true, or use router.grpcRoute" -}}
{{- end -}}
{{- $routes := false -}}
{{- range $kind := list "httpRoute" "grpcRoute" -}}
{{- $route := get $router $kind -}}
{{- if $route.enabled -}}
{{- $routes = true -}}
{{- if not $route.parentRefs -}}
{{- fail (printf "router.%s.parentRefs is empty: name the gateway, such as [{ name: inference, namespace: gateways }]" $kind) -}}
{{- end -}}
{{- else if or $route.parentRefs $route.hostnames -}}
{{- fail (printf "router.%s has parentRefs or hostnames, but is off: set router.%s.enabled to true, or remove them" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $routes $router.tls.enabled (not $router.backendTls.caConfigMap) -}}
{{- fail "router.tls is on, so gateways must verify the routers' certificate: give router.backendTls.caConfigMap, a ConfigMap with its CA in ca.crt" -}}
{{- end -}}
{{- if and $router.backendTls.caConfigMap (not (and $routes $router.tls.enabled)) -}}
{{- fail "router.backendTls is for gateways that connect to routers by TLS: set router.tls.enabled and router.httpRoute or router.grpcRoute, or remove it" -}}
{{- end -}}
{{- $exposed := include "inflight.exposedPorts" . | fromYamlArray -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled .clients $exposed (not .controllers) -}}
{{- fail "networkPolicy.clients keeps the controller of router.ingress, or the gateways of the routes, from the routers: give their pods in networkPolicy.controllers" -}}
{{- end -}}
{{- if and .controllers (not (and .clients $exposed)) -}}
{{- fail "networkPolicy.controllers is for router.ingress, router.httpRoute and router.grpcRoute beside networkPolicy.clients: set one and clients (without clients, everyone may connect), or remove it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
