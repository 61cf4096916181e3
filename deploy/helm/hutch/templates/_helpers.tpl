{{- define "hutch.labels" -}}
app.kubernetes.io/name: hutch
app.kubernetes.io/component: server
{{- end }}

{{- /* Of an object in the namespace that it is called with. */}}
{{- define "hutch.metadata" -}}
name: hutch
namespace: {{ . | quote }}
labels: {{- include "hutch.labels" . | nindent 2 }}
{{- end }}

{{- /* What a volume with a data folder has to be. */}}
{{- define "hutch.claim" -}}
accessModes: [ReadWriteOnce]
resources:
  requests:
    storage: {{ .Values.storage.size | quote }}
{{- with .Values.storage.class }}
storageClassName: {{ . | quote }}
{{- end }}
{{- end }}
