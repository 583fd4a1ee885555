package config

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/epochkv/epochkv/internal/doctable"
	"github.com/epochkv/epochkv/internal/storage"
)

// TestOptionTableIsThatOfTheCode keeps the operators' table equal to what --help prints.
func TestOptionTableIsThatOfTheCode(t *testing.T) {
	var b strings.Builder
	b.WriteString(doctable.Head("option", "default", "meaning"))
	newOptions().flags.VisitAll(func(f *pflag.Flag) {
		def := f.DefValue
		if def != "" {
			def = "`" + def + "`"
		}
		b.WriteString(doctable.Row("`--"+f.Name+"`", def, f.Usage))
	})
	doctable.Check(t, "../../docs/operations.md", "options", b.String())
}

// TestTextsNameTheSizesThatTheEngineDerives looks at an engine's own derivation.
func TestTextsNameTheSizesThatTheEngineDerives(t *testing.T) {
	sizes := storage.DefaultSizes(int64(Default().Memory))
	flags := newOptions().flags
	for name, bytes := range map[string]int64{
		"cache-size": sizes.Cache, "memtable-size": sizes.Memtable, "segment-size": sizes.Segment, "disk-reserve": sizes.DiskReserve,
	} {
		if usage := flags.Lookup(name).Usage; bytes == 0 || !strings.Contains(usage, Size(bytes).String()) {
			t.Errorf("--%s: %q does not say %v", name, usage, Size(bytes))
		}
	}
}
