package telemetry

import (
	"fmt"
	"runtime/debug"
)

// BuildInfo identifies the source of this binary.
type BuildInfo struct {
	Version  string // the module's version, or "devel"
	Revision string // the commit, with "+dirty" if the checkout had changes; empty if unknown
	Go       string // the toolchain
}

// Build reads the information that the Go linker writes into every binary, so that no build flag is
// needed.
func Build() BuildInfo {
	b := BuildInfo{Version: "devel"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Go = info.GoVersion
	if v := info.Main.Version; v != "" && v != "(devel)" {
		b.Version = v
	}
	dirty := false
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			dirty = s.Value == "true"
		}
	}
	if dirty && b.Revision != "" {
		b.Revision += "+dirty"
	}
	return b
}

// String is the text that --version prints.
func (b BuildInfo) String() string {
	if b.Revision == "" {
		return fmt.Sprintf("kvserver %s (%s)", b.Version, b.Go)
	}
	return fmt.Sprintf("kvserver %s (%s, %s)", b.Version, b.Revision, b.Go)
}
