package archive

import (
	"bytes"
	"context"
	"io"
	"path"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/testseed"
)

// unmerged is an archive of very many files of one epoch each, of which only some can be read.
type unmerged struct {
	objectstore.Store // nil
	files             int
	whole             map[string][]byte // what can be read
	damaged           int               // files with the largest epochs that are
	reads             atomic.Int64
	live              int64 // most bytes of the heap that were live
}

func (u *unmerged) List(_ context.Context, prefix string, each func(objectstore.Object) error) error {
	for e := range u.files {
		name := prefix + FileName(keys.Epoch(e+1), keys.Epoch(e+1))
		size := int64(trailerSize)
		if data := u.whole[path.Base(name)]; data != nil {
			size = int64(len(data))
		}
		if err := each(objectstore.Object{Name: name, Size: size, Created: time.Unix(1, 0)}); err != nil {
			return err
		}
	}
	return nil
}

func (u *unmerged) Read(_ context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	if u.reads.Add(1) == 1 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		u.live = int64(m.HeapAlloc)
	}
	if data := u.whole[path.Base(name)]; data != nil {
		return io.NopCloser(bytes.NewReader(data[offset : offset+length])), nil
	}
	if first, _, _ := ParseFileName(path.Base(name)); int(first) > u.files-u.damaged {
		return io.NopCloser(strings.NewReader(strings.Repeat("x", int(length)))), nil
	}
	return nil, objectstore.ErrNotFound
}

func (u *unmerged) String() string { return "unmerged" }

// stableAt is a store that has epochs up to one.
type stableAt struct {
	Source
	epoch keys.Epoch
}

func (s stableAt) Stable() keys.Epoch { return s.epoch }

// TestFilesThatAreNotMergedTakeLittleMemory: a target that does not let objects be deleted has one for each four seconds. The server looked at all of
// them at each start, with some hundred bytes for each.
func TestFilesThatAreNotMergedTakeLittleMemory(t *testing.T) {
	testseed.SkipUnderRace(t)
	const files, damaged, most = 200_000, filesMax + 10, 16 << 20
	target := &unmerged{files: files, damaged: damaged, whole: map[string][]byte{}}
	for _, e := range []keys.Epoch{files - damaged - 1, files - damaged} {
		h := Header{Lineage: testLineage, First: e, Begin: Linked, Link: Link{Epoch: e - 1}, Level: 2}
		_, data := write(t, h, []Record{{Epoch: e, Body: body(t, 1_700_000_000_000_000, "key", []byte("value"))}})
		target.whole[FileName(e, e)] = data
	}
	a := New(stableAt{epoch: files}, Options{Target: target, Identity: func() Identity { return Identity{Lineage: testLineage} }})
	a.place = place{target, testLineage}
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	newest, info, found, err := a.newest(t.Context())
	if err != nil || !found || newest.last != files-damaged || info.Last.Epoch != newest.last {
		t.Fatalf("the newest file that is whole ends at epoch %d, its trailer says %d, found %v: %v", newest.last, info.Last.Epoch, found, err)
	}
	if took := target.live - int64(before.HeapAlloc); took > most {
		t.Errorf("the newest of %d files took %d MiB", files, took>>20)
	}
	target.reads.Store(0)
	list, err := a.Intervals(t.Context())
	if err != nil || len(list) != 1 || list[0].First != files-damaged-1 || list[0].Last != files-damaged {
		t.Fatalf("the intervals are %v: %v", list, err)
	}
	if took := target.live - int64(before.HeapAlloc); took > most {
		t.Errorf("the intervals of %d files took %d MiB", files, took>>20)
	}
}
