package config

import "regexp"

// Kubernetes announces the Services of a namespace to every container in environment variables
// (service links). The variables of a Service named kvserver, or kvserver-something, begin with the
// server's prefix and are not meant for it.
//
//	KVSERVER_SERVICE_HOST=10.0.0.7            KVSERVER_PORT=tcp://10.0.0.7:7400
//	KVSERVER_SERVICE_PORT=7400                KVSERVER_PORT_7400_TCP=tcp://10.0.0.7:7400
//	KVSERVER_SERVICE_PORT_GRPC=7400           KVSERVER_PORT_7400_TCP_PROTO=tcp, _PORT=7400, _ADDR=10.0.0.7
//
// The name alone does not decide, because an operator may have misspelt an option:
// KVSERVER_PORT=7400 is an error.
var injectedShapes = []struct{ name, value *regexp.Regexp }{
	{regexp.MustCompile(`_SERVICE_HOST$`), regexp.MustCompile(`.`)},
	{regexp.MustCompile(`_SERVICE_PORT(_[A-Z0-9_]+)?$`), regexp.MustCompile(`^[0-9]+$`)},
	{regexp.MustCompile(`_PORT(_[0-9]+_(TCP|UDP|SCTP))?$`), regexp.MustCompile(`^(tcp|udp|sctp)://`)},
	{regexp.MustCompile(`_PORT_[0-9]+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)$`), regexp.MustCompile(`.`)},
}

// injected reports whether Kubernetes has set a variable that begins with the server's prefix. No
// option has such a name.
func injected(variable, value string) bool {
	for _, shape := range injectedShapes {
		if shape.name.MatchString(variable) && shape.value.MatchString(value) {
			return true
		}
	}
	return false
}
