package pager

import (
	"errors"

	"github.com/epochkv/epochkv/internal/vfs"
)

// patientFile reads again what the device fails to read, as long as again allows it: see Options.ReadAgain.
type patientFile struct {
	vfs.File
	again func(failed int) bool
}

func (f patientFile) ReadAt(buf []byte, offset int64) (n int, err error) {
	for failed := 1; ; failed++ {
		if n, err = f.File.ReadAt(buf, offset); !errors.Is(err, vfs.ErrDevice) || f.again == nil || !f.again(failed) {
			return n, err
		}
	}
}
