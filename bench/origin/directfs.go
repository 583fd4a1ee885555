package origin

import (
	"errors"
	"unsafe"

	"github.com/epochkv/epochkv/internal/vfs"
)

// directReads is a file system whose aligned reads go past the page cache, whatever else is done buffered. So what is measured
// is the device, and neither what the kernel kept nor what it reads ahead on its own.
type directReads struct{ *vfs.OS }

// Open implements vfs.FS.
func (d directReads) Open(name string, mode vfs.Mode) (vfs.File, error) {
	buffered, err := d.OS.Open(name, mode)
	if err != nil {
		return nil, err
	}
	direct, err := d.Direct().Open(name, vfs.ReadOnly)
	if err != nil {
		return nil, errors.Join(err, buffered.Close())
	}
	return &directFile{File: buffered, direct: direct}, nil
}

// directFile is one file opened twice. The kernel keeps direct reads coherent: it writes dirty pages back first.
type directFile struct {
	vfs.File // buffered
	direct   vfs.File
}

func aligned(p []byte, offset int64) bool {
	address := uintptr(unsafe.Pointer(unsafe.SliceData(p)))
	return (address|uintptr(len(p))|uintptr(offset))%vfs.DirectAlignment == 0
}

// ReadAt implements vfs.File.
func (f *directFile) ReadAt(p []byte, offset int64) (int, error) {
	if aligned(p, offset) {
		return f.direct.ReadAt(p, offset)
	}
	return f.File.ReadAt(p, offset)
}

// ReadBatch implements vfs.File.
func (f *directFile) ReadBatch(requests []vfs.Request) error {
	for i := range requests {
		if !aligned(requests[i].Buf, requests[i].Offset) {
			return f.File.ReadBatch(requests)
		}
	}
	return f.direct.ReadBatch(requests)
}

// Close implements vfs.File.
func (f *directFile) Close() error { return errors.Join(f.direct.Close(), f.File.Close()) }
