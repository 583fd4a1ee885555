package archive

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// bootIDFile has a random id of the running system, which is another one after each start of the machine.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// LockID identifies the lock file of a data directory among all machines, until the next start of this one: two processes with the
// same id cannot have the lock at the same time. A copy of the directory, and a new file with the same name, have another id. Empty if it
// cannot be known.
func LockID(file string) string {
	boot, err := os.ReadFile(bootIDFile)
	if err != nil || len(boot) == 0 {
		return ""
	}
	info, err := os.Stat(file)
	if err != nil {
		return ""
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("%s:%d:%d", strings.TrimSpace(string(boot)), s.Dev, s.Ino)
}
