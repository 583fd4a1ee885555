package pager

import (
	"errors"

	"github.com/epochkv/epochkv/internal/vfs"
)

// patientFile reads again what the device fails to read, as long as again allows it: see Options.ReadAgain. Without again it never does.
type patientFile struct {
	vfs.File
	again func(failed int) bool
}

func (f patientFile) ReadAt(buf []byte, offset int64) (n int, err error) {
	n, err = f.File.ReadAt(buf, offset)
	return f.retry(buf, offset, n, err)
}

// retry goes on after the first read, whose result is n and err.
func (f patientFile) retry(buf []byte, offset int64, n int, err error) (int, error) {
	for failed := 1; f.again != nil && errors.Is(err, vfs.ErrDevice) && f.again(failed); failed++ {
		n, err = f.File.ReadAt(buf, offset)
	}
	return n, err
}
