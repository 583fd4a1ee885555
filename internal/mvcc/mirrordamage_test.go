package mvcc

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestRecordsInARepairTreeAreReadFromItsMirror: records were written anew after a damaged page had hidden them. Then a page of the repair tree is
// damaged, too, each in turn: a scan that goes on after damage visits all records nevertheless.
func TestRecordsInARepairTreeAreReadFromItsMirror(t *testing.T) {
	const records, prefix = 60, keys.SystemRole
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.PageSize = 512
	write := func(s *Store, value string) {
		x := mustSession(t, s)
		defer x.Close()
		for i := range records {
			w := &Write{Durability: DurabilitySync}
			w.SetOwn()
			w.Batch.SetRecord(keys.SpaceSystem, fmt.Appendf([]byte{prefix}, "%03d", i), []byte(strings.Repeat(value, 60)))
			if _, err := x.commitDurably(t.Context(), w); err != nil {
				t.Fatal(err)
			}
		}
		mustCheckpoint(t, s)
	}
	s := mustStart(t, o)
	for i := range 20 {
		mustPut(t, s, fmt.Sprint("filler ", i), strings.Repeat("v", 100))
	}
	write(s, "o")
	mustClose(t, s)
	within := []byte{byte(keys.SpaceSystem), prefix}
	hidden := damageLeaves(t, fs, 512, func(first, last []byte) bool { return bytes.HasPrefix(first, within) && bytes.HasPrefix(last, within) })
	s = mustStart(t, o)
	write(s, "n")
	if err := s.Close(); err != nil || hidden < 3 {
		t.Fatalf("%d leaves are hidden, %v", hidden, err)
	}

	intact, damaged := dataFile(t, fs), 0
	for at := 0; at+512 <= len(intact); at += 512 {
		if p := intact[at : at+512]; !page.IsTree(p, 0) || !bytes.Contains(p, []byte("nnnn")) {
			continue
		}
		damaged++
		disk := fs.Crash(1, vfs.SurviveAll)
		f, err := disk.Open("db/data.ekv", vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte{^intact[at+511]}, int64(at+511)); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		o.Storage.FS = disk
		s := mustStart(t, o)
		x, found := mustSession(t, s), 0
		err = x.ScanReadable(t.Context(), []byte{prefix}, []byte{prefix + 1}, func(_, value []byte, _ keys.Epoch) bool {
			if value[0] == 'n' {
				found++
			}
			return true
		}, func(_, _ []byte, _ error) {})
		if err != nil || found < records-2*3 {
			t.Errorf("beside damage at %d: %d of %d records, %v", at, found, records, err)
		}
		x.Close()
		_ = s.Close()
	}
	if damaged < 6 {
		t.Errorf("%d pages were damaged, the test tests too little", damaged)
	}
}
