//go:build !race

package pin

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Commands of membarrier(2).
const (
	membarrierExpedited         = 8
	membarrierRegisterExpedited = 16
)

// canFence says that fenceReaders works here: the kernel may be older than 4.14, or a sandbox may refuse the call.
var canFence = membarrier(membarrierRegisterExpedited) == nil

// fenceReaders makes every thread of the process execute a full barrier: what a reader has stored before a load that is over is seen from
// here on, and what it loads later sees what was stored before. It took 0.2 to 0.5 us on two processors.
func fenceReaders() {
	for try := 0; ; try++ {
		err := membarrier(membarrierExpedited)
		if err == nil {
			return
		}
		if try == fenceTries {
			panic(fmt.Sprintf("pin: membarrier: %v", err)) // going on could give memory away that is being read
		}
		_ = membarrier(membarrierRegisterExpedited) // a process that was frozen and brought back may have to
	}
}

// fenceTries bounds how often a fence is tried again: the kernel may be short of memory for a moment.
const fenceTries = 3

func membarrier(command uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, command, 0, 0); errno != 0 {
		return errno
	}
	return nil
}
