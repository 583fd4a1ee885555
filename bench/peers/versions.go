package peers

import (
	"debug/buildinfo"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// Modules are the clients, whose versions belong in a report.
var Modules = []string{"go.etcd.io/etcd/client/v3", "github.com/redis/go-redis/v9"}

// Compares reports whether a scenario measures other servers.
func Compares(scenario string) bool {
	return strings.HasPrefix(scenario, "peers-") || strings.HasPrefix(scenario, "watch-")
}

var redisVersion = regexp.MustCompile(`v=([0-9.]+)`)

// Versions are those of the servers, as far as they are there.
func Versions(scratch string) map[string]string {
	found := map[string]string{}
	if out, err := exec.Command("redis-server", "--version").Output(); err == nil {
		if match := redisVersion.FindSubmatch(out); match != nil {
			found["redis-server"] = string(match[1])
		}
	}
	if info, err := buildinfo.ReadFile(filepath.Join(scratch, "bin", "etcdserver")); err == nil {
		for _, module := range info.Deps {
			if module.Path == "go.etcd.io/etcd/server/v3" {
				found[module.Path] = module.Version
			}
		}
	}
	return found
}
