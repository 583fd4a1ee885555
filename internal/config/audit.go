package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/epochkv/epochkv/internal/audit"
)

// Audit is the audit log.
type Audit struct {
	File      string // empty: there is none
	Classes   string // that are written beside auth, admin and denied: of write and read, with commas
	Keys      audit.Keys
	Full      audit.Full
	FileSize  Size // from which the file is rotated
	Files     int  // that are kept
	QueueSize Size // of lines that wait to be written
	Chain     bool
}

const (
	auditFileSizeMin  = 64 * KiB // below, files last for seconds
	auditQueueSizeMin = 64 * KiB // below, the lines of a burst are dropped
	auditFilesMax     = 10_000   // more files would slow down the directory
)

func (a *Audit) flags(f *pflag.FlagSet) {
	f.StringVar(&a.File, "audit-file", a.File, "file of the audit log, a line of JSON for each request; empty for none")
	f.StringVar(&a.Classes, "audit", a.Classes, "requests in the audit log beside logins, administration and refusals: write, read, or write,read")
	f.Var((*choice)(&a.Keys), "audit-keys", "how it names keys: hash, of the prefix up to the first slash and of the key; whole; or none")
	f.Var((*choice)(&a.Full), "audit-full", "when its queue is full: drop lines, counted; or block requests, which are refused while it cannot be written")
	f.Var(&a.FileSize, "audit-file-size", "from which size on it is continued in a new file")
	f.IntVar(&a.Files, "audit-files", a.Files, "most files of it; the oldest are removed")
	f.Var(&a.QueueSize, "audit-queue-size", "most bytes of lines that wait to be written")
	f.BoolVar(&a.Chain, "audit-chain", a.Chain, "each line has the hash of the line before it, for kvctl audit verify")
}

// Wants reports whether the lines of a class are written.
func (a *Audit) Wants(c audit.Class) bool {
	if c == audit.ClassWrite || c == audit.ClassRead {
		return slices.Contains(strings.Split(a.Classes, ","), string(c))
	}
	return true
}

func (a *Audit) validate(v *validation) {
	for _, class := range strings.Split(a.Classes, ",") {
		v.check(class == "" || class == string(audit.ClassWrite) || class == string(audit.ClassRead), "audit",
			fmt.Sprintf("has %q; give write, read, or write,read", class))
	}
	v.check(a.Classes == "" || a.File != "", "audit", "needs --audit-file")
	v.check(a.Keys == audit.KeysHash || a.Keys == audit.KeysWhole || a.Keys == audit.KeysNone, "audit-keys", fmt.Sprintf("is %q; choose hash, whole or none", a.Keys))
	v.check(a.Full == audit.FullDrop || a.Full == audit.FullBlock, "audit-full", fmt.Sprintf("is %q; choose drop or block", a.Full))
	v.size("audit-file-size", a.FileSize, auditFileSizeMin, sizeMax)
	v.size("audit-queue-size", a.QueueSize, auditQueueSizeMin, GiB)
	v.check(a.Files >= 2 && a.Files <= auditFilesMax, "audit-files", fmt.Sprintf("is %d; choose between 2 and %d", a.Files, auditFilesMax))
}
