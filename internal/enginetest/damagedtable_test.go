package enginetest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestADamagedPageOfTheTableCostsNoSpace: a damaged page of the indirection table that has others below it does not name them any more. They are free
// once the table has been written anew: every page of arrays is damaged in turn, those of the allocation map and of the free table among them.
func TestADamagedPageOfTheTableCostsNoSpace(t *testing.T) {
	mem := vfs.NewMem()
	o := modelOptions(mem)
	s := mustReopen(t, o)
	put := func(s *mvcc.Store, i int) {
		mustPut(t, s, fmt.Sprintf("k%04d", i), strings.Repeat(fmt.Sprint(i, "."), 200)[:300])
	}
	for i := range 400 {
		put(s, i)
	}
	mustClose(t, s)
	file, size, rebuilt := readFile(t, mem, dataFile), o.Storage.PageSize, 0
	for id := page.ID(2); (int(id)+1)*size <= len(file); id++ {
		p := file[int(id)*size:][:size]
		if page.Check(p, id) != nil || page.ReadHeader(p).Type != page.TypeArray {
			continue
		}
		o := o
		o.Storage.FS = mem.Crash(0, vfs.SurviveAll)
		flip(t, o.Storage.FS, int64(int(id)*size+100))
		s := mustReopen(t, o)
		if strings.Contains(strings.Join(s.Recovery().Repaired, " "), "indirection table") {
			rebuilt++
		}
		for range 2 {
			put(s, 1)
			if err := s.Checkpoint(t.Context()); err != nil {
				t.Fatal(err)
			}
			mustClose(t, s)
			s = mustReopen(t, o)
		}
		mustClose(t, s)
		verifyFiles(t, o)
	}
	if rebuilt < 5 {
		t.Errorf("the table was rebuilt %d times: the test tests little", rebuilt)
	}
}
