package config

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestVariablesOfAKubernetesServiceAreIgnored(t *testing.T) {
	environ := []string{
		"KVSERVER_SERVICE_HOST=10.0.0.7", "KVSERVER_SERVICE_PORT=7400", "KVSERVER_SERVICE_PORT_GRPC=7400", "KVSERVER_SERVICE_PORT_HTTP_METRICS=7401",
		"KVSERVER_PORT=tcp://10.0.0.7:7400", "KVSERVER_PORT_7400_TCP=tcp://10.0.0.7:7400", "KVSERVER_PORT_7400_TCP_PROTO=tcp",
		"KVSERVER_PORT_7400_TCP_PORT=7400", "KVSERVER_PORT_7400_TCP_ADDR=10.0.0.7", "KVSERVER_PORT_53_UDP=udp://10.0.0.7:53",
		"KVSERVER_HEADLESS_SERVICE_HOST=10.0.0.8", "KVSERVER_HEADLESS_PORT=tcp://10.0.0.8:7400", "KVSERVER_HEADLESS_PORT_7400_TCP_ADDR=10.0.0.8",
	}
	in, err := Load(nil, append(environ, "KVSERVER_MEMORY=256MiB"))
	if err != nil {
		t.Fatal(err)
	}
	if in.Config.Memory != 256*MiB {
		t.Errorf("memory %v: an option beside them was lost", in.Config.Memory)
	}
	if len(in.Ignored) != len(environ) {
		t.Errorf("ignored %q", in.Ignored)
	}
	for _, variable := range []string{"KVSERVER_SERVICE_HOST", "KVSERVER_PORT"} {
		if !slices.Contains(in.Ignored, variable) {
			t.Errorf("%s is not named", variable)
		}
	}
}

func TestMisspeltOptionsAreNotTakenForKubernetes(t *testing.T) {
	for _, variable := range []string{
		"KVSERVER_PORT=7400", "KVSERVER_LISTEN_PORT=7400", "KVSERVER_PORTS=tcp://x:1", "KVSERVER_MEMROY=1GiB", "KVSERVER_SERVICE=1", "KVSERVER_HOST=127.0.0.1",
	} {
		if _, err := Load(nil, []string{variable}); !errors.Is(err, errUnknownOption) {
			t.Errorf("%s: %v", variable, err)
		}
	}
}

func TestNoOptionHasAnInjectedName(t *testing.T) {
	for _, name := range newOptions().names() {
		variable := envPrefix + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
		if injected(variable, "tcp://10.0.0.7:7400") || injected(variable, "7400") {
			t.Errorf("a Service could set --%s", name)
		}
	}
}
