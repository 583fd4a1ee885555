package pager

import (
	"errors"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestUnreadableSectorIsDamage: a page that the device cannot read is reported like a page with wrong
// contents: as damaged, with its location. Alone and in a batch, with the page cache and without.
func TestUnreadableSectorIsDamage(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	p, err := Create(fs, toyFile, Options{PageSize: 512})
	must(t, err)
	y := &toy{p: p, r: &p.Reader}
	must(t, y.checkpoint(7, []int{0, 1, 5}, nil, 100))
	root := y.p.State().Root
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENODATA, syscall.EREMOTEIO, syscall.EILSEQ} {
		rule := fs.Inject(vfs.Rule{Op: vfs.OpRead, Name: toyFile, Err: errno})
		buf := make([]byte, 512)
		reads := []Read{{ID: root, Buf: buf}}
		_ = y.p.ReadPages(reads)
		for _, err := range []error{y.p.ReadPage(root, buf), reads[0].Err} {
			var damage *CorruptError
			if !errors.As(err, &damage) || damage.Page != root || damage.Offset != int64(root)*512 {
				t.Errorf("%v: %v", errno, err)
			}
		}
		rule.Remove()
	}
	must(t, y.p.Close())
}
