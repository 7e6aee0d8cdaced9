// The container that holds a pod's namespaces.
module inflight.test/pause

go 1.26
