package harness

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine says where and with what a report was made.
type Machine struct {
	CPU      string            `json:"cpu"`
	Cores    int               `json:"cores"`
	MemoryMB int64             `json:"memory_mb"`
	Kernel   string            `json:"kernel"`
	Go       string            `json:"go"`
	Commit   string            `json:"commit"`
	Dirty    bool              `json:"dirty,omitempty"` // the tree had changes that the commit does not have
	Versions map[string]string `json:"versions"`        // of the peers
}

// String is one line, without the versions of the peers.
func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, %d MB, Linux %s, %s", m.CPU, m.Cores, m.MemoryMB, m.Kernel, m.Go)
}

// Describe looks at the machine; peers are module paths whose versions belong in the report.
func Describe(peers ...string) Machine {
	m := Machine{
		CPU: field("/proc/cpuinfo", "model name"), Cores: runtime.NumCPU(), Go: runtime.Version(), Versions: map[string]string{},
	}
	if kb, err := strconv.ParseInt(strings.TrimSuffix(field("/proc/meminfo", "MemTotal"), " kB"), 10, 64); err == nil {
		m.MemoryMB = kb >> 10
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	m.Commit = git("rev-parse", "--short=12", "HEAD")
	m.Dirty = git("status", "--porcelain", "--untracked-files=no") != ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			for _, peer := range peers {
				if module.Path == peer {
					m.Versions[peer] = module.Version
				}
			}
		}
	}
	return m
}

// field is the value of the first "name: value" line of a proc file.
func field(file, name string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// git is the output of a git command, or empty where there is no repository.
func git(args ...string) string {
	out, err := exec.Command("git", args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
