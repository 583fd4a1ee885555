package enginetest

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestARefusedStartChangesNothing: a device that cannot read for a moment, from any read on, may keep a store from starting. The files stay as they are, and the next
// start succeeds. The newest superblock may be among what cannot be read, and what rebuilds tables of the state before must not take its place.
func TestARefusedStartChangesNothing(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, c := range []struct{ puts, bytes int }{{52, 30000}, {510, 100}, {60, 3000}} {
		mem := vfs.NewMem()
		o := modelOptions(mem)
		o.Storage.PageSize = 8192
		s, err := mvcc.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		for i := range c.puts {
			mustPut(t, s, fmt.Sprintf("key-%05d", i), fmt.Sprint(i)+strings.Repeat("v", c.bytes))
		}
		mustClose(t, s)
		for _, name := range []string{"data.ekv", "*.log", "*"} {
			refused := 0
			for from := 1; from < 30; from++ {
				fs := mem.Crash(1, vfs.SurviveProcess) // another copy
				faults := vfs.NewFaulty(fs)
				o := o
				o.Storage.FS = faults
				faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: name, Nth: from, Sticky: true, Err: syscall.EIO})
				before := contents(t, fs)
				s, first := mvcc.Open(o)
				if first == nil {
					_ = s.Close()
					continue
				}
				refused++
				what := fmt.Sprintf("%d puts of %d bytes, reads of %s failed from the %d. on: %v", c.puts, c.bytes, name, from, first)
				after := contents(t, fs)
				for _, file := range slices.Sorted(maps.Keys(before)) {
					if was, is := before[file], after[file]; !bytes.Equal(was, is) {
						t.Errorf("%s has changed\n%s", file, what)
					}
					delete(after, file)
				}
				for file := range after {
					t.Errorf("%s is new\n%s", file, what)
				}
				o.Storage.FS = fs
				if s, err = mvcc.Open(o); err != nil {
					t.Errorf("the next start: %v\n%s", err, what)
					continue
				}
				mustClose(t, s)
			}
			if refused == 0 {
				t.Errorf("%d puts of %d bytes: no start is refused because of %s: the test proves nothing", c.puts, c.bytes, name)
			}
		}
	}
}

// contents are those of all files of a store.
func contents(t testing.TB, fs vfs.FS) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	for _, dir := range []string{"db", "db/wal"} {
		names, err := fs.List(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			f, err := fs.Open(path.Join(dir, name), vfs.ReadOnly)
			if err != nil {
				continue // a directory
			}
			size, err := f.Size()
			content := make([]byte, size)
			if err == nil && size > 0 {
				_, err = f.ReadAt(content, 0)
			}
			if err != nil && err != io.EOF {
				t.Fatal(name, err)
			}
			all[path.Join(dir, name)] = content
			_ = f.Close()
		}
	}
	return all
}
