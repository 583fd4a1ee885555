package enginetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestSalvageFindsLeavesBelowADamagedRootDespiteARepairTree: a leaf of the repair tree, or of its
// mirror, has few keys of its range. For the other keys it proves nothing, although its checkpoint
// is newer than theirs.
func TestSalvageFindsLeavesBelowADamagedRootDespiteARepairTree(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	want := map[string]string{}
	key := func(i int) string { return fmt.Sprintf("k%03d", i) }
	s := mustReopen(t, o)
	for i := range 300 {
		mustPut(t, s, key(i), "old"+strings.Repeat("v", 40))
		want[key(i)] = "old" + strings.Repeat("v", 40)
	}
	mustClose(t, s)

	// Two leaves at the ends are damaged, and keys in their ranges are written.
	leaves := userLeaves(t, o.Storage.FS, o.Storage.PageSize)
	for _, l := range []leafAt{leaves[0], leaves[len(leaves)-1]} {
		flip(t, o.Storage.FS, int64(l.id)*int64(o.Storage.PageSize)+100)
		for _, k := range l.keys {
			delete(want, k)
		}
	}
	s = mustReopen(t, o)
	for _, i := range []int{0, 299} {
		mustPut(t, s, key(i), "new")
		want[key(i)] = "new"
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	flip(t, o.Storage.FS, int64(rootPage(t, o.Storage.FS))*int64(o.Storage.PageSize)+100)
	got, report := mustSalvage(t, o.Storage.FS)
	if err := equalMaps(want, got); err != nil {
		t.Errorf("%v; %d keys of %d, report %+v", err, len(got), len(want), report)
	}
}

func mustReopen(t *testing.T, o mvcc.Options) *mvcc.Store {
	t.Helper()
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// leafAt is a leaf of the data file, with the client keys on it.
type leafAt struct {
	id   page.ID
	keys []string
}

// userLeaves lists the live leaves of the newest state that begin with a client's key, in key
// order.
func userLeaves(t *testing.T, fs vfs.FS, pageSize int) (leaves []leafAt) {
	t.Helper()
	file := readFile(t, fs, dataFile)
	for _, id := range treePages(t, fs) {
		p := file[int(id)*pageSize:][:pageSize]
		if !page.IsTree(p, 0) {
			continue
		}
		l := leafAt{id: id}
		v := page.Leaf(p).Layout()
		for i := range v.Count() {
			suffix, _, _, _ := v.At(i)
			if k := slices.Concat(v.Prefix(), suffix); keys.SpaceOf(k) == keys.SpaceUser {
				l.keys = append(l.keys, string(keys.User(k)))
			}
		}
		if len(l.keys) > 0 {
			leaves = append(leaves, l)
		}
	}
	slices.SortFunc(leaves, func(a, b leafAt) int { return strings.Compare(a.keys[0], b.keys[0]) })
	return leaves
}

// rootPage is the root of the last durable state.
func rootPage(t testing.TB, fs vfs.FS) page.ID {
	t.Helper()
	root, err := newestRoot(fs)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// newestRoot is the root of the newest state in the file. While a store writes, the file may change meanwhile.
func newestRoot(fs vfs.FS) (page.ID, error) {
	p, err := pager.OpenSnapshot(fs, dataFile)
	if err != nil {
		return 0, err
	}
	defer func() { _ = p.Close() }()
	return p.State().Root, nil
}

// TestSalvageLosesNothingWithDamagedInnerPages: after random writes on a damaged store, pages
// without client data are damaged, too: some or all inner pages of the tree, the allocation map,
// both superblocks with their copies. Salvage restores every key that could be read, and no wrong
// version. Only without the allocation map or superblocks it may restore deleted keys and
// superseded versions.
func TestSalvageLosesNothingWithDamagedInnerPages(t *testing.T) {
	base := testseed.Base(t)
	brought := map[string]int{}
	for run := range uint64(*sideSeeds / exhaustiveStep) {
		seed := base + run
		rng := rand.New(rand.NewPCG(seed, 17))
		d := &besideDamage{t: t, rng: rng, o: modelOptions(vfs.NewMem()), want: map[string]string{}, since: map[string]bool{}}
		d.open()
		for round := range 8 {
			d.write(20 + rng.IntN(150))
			if rng.IntN(3) == 0 {
				d.crash()
			} else if err := d.s.Checkpoint(context.Background()); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if round >= 4 && rng.IntN(2) == 0 {
				d.damage()
			}
		}
		if rng.IntN(2) == 0 {
			d.restart()
		}
		readable := d.check()
		d.close()
		files := mustRead(t, d.o.Storage.FS)
		for _, kind := range []string{"one inner page", "inner pages", "map and inner pages", "superblocks"} {
			fs := files.files(t)
			damageKind(t, rng, fs, d.o.Storage.PageSize, kind)
			got, report := mustSalvage(t, fs)
			for k, v := range readable {
				if got[k] != v {
					t.Fatalf("seed %d, %s: salvaged %q = %.20q, want %.20q; report %+v", seed, kind, k, got[k], v, report)
				}
			}
			for k, v := range got {
				if d.want[k] != v && (kind == "one inner page" || kind == "inner pages") {
					t.Fatalf("seed %d, %s: salvaged %q = %.20q, want %.20q; report %+v", seed, kind, k, v, d.want[k], report)
				}
			}
			brought[kind] += int(report.FromScan)
		}
	}
	for kind, n := range brought {
		if n == 0 {
			t.Errorf("%s: no key was found outside the tree: the test tests nothing", kind)
		}
	}
}

// damageKind damages pages that hold no version of a client's key.
func damageKind(t *testing.T, rng *rand.Rand, fs vfs.FS, pageSize int, kind string) {
	t.Helper()
	file := readFile(t, fs, dataFile)
	tree := treePages(t, fs) // not the repair tree's: what its damage may hide is not brought out
	var inner, maps, supers []page.ID
	for id := page.ID(0); (int(id)+1)*pageSize <= len(file); id++ {
		p := file[int(id)*pageSize:][:pageSize]
		switch {
		case id < 2 || page.ReadHeader(p).Type == page.TypeSuperblock:
			supers = append(supers, id)
		case page.Check(p, id) != nil:
		case page.ReadHeader(p).Type == page.TypeInner && slices.Contains(tree, id):
			inner = append(inner, id)
		case page.ReadHeader(p).Type == page.TypeArray:
			maps = append(maps, id)
		}
	}
	bad := inner
	switch kind {
	case "one inner page":
		bad = nil
		if len(inner) > 0 {
			bad = []page.ID{inner[rng.IntN(len(inner))]}
		}
	case "map and inner pages":
		bad = slices.Concat(inner, maps)
	case "superblocks":
		bad = supers
	}
	for _, id := range bad {
		flip(t, fs, int64(id)*int64(pageSize)+100)
	}
}

// TestSalvageRestoresNothingOfAnUncommittedBulkLoad: without the allocation map the pages of a bulk
// load that a crash has interrupted look like other pages, and newer.
func TestSalvageRestoresNothingOfAnUncommittedBulkLoad(t *testing.T) {
	for op := int64(1); ; op++ {
		o := modelOptions(vfs.NewMem())
		s := mustReopen(t, o)
		want := map[string]string{}
		for i := range 300 { // the older states leave free pages
			k, v := fmt.Sprintf("k%03d", i%100), fmt.Sprint("committed ", i)
			mustPut(t, s, k, v)
			if want[k] = v; i%100 == 99 {
				if err := s.Checkpoint(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		loaded := loadWithCrash(t, s, o.Storage.FS.(*vfs.Mem), op)
		left := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveNone) // pages that were synced, and the superblock not
		_ = s.Close()                                             // on a disk that is gone
		if loaded {
			return
		}
		damageKind(t, nil, left, o.Storage.PageSize, "map and inner pages")
		got, report := mustSalvage(t, left)
		for k, v := range got {
			if v == "loaded" && report.Epoch < 1<<28 {
				t.Fatalf("crash at operation %d: %q is restored as in the bulk load; report %+v", op, k, report)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("crash at operation %d: %d keys, want %d; report %+v", op, len(got), len(want), report)
		}
	}
}

// loadWithCrash makes a bulk load of all keys, crashes the disk at an operation, and reports
// whether the bulk load was committed before.
func loadWithCrash(t *testing.T, s *mvcc.Store, fs *vfs.Mem, op int64) bool {
	t.Helper()
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := l.Add(fmt.Appendf(nil, "k%03d", i), []byte("loaded")); err != nil {
			t.Fatal(err)
		}
	}
	fs.CrashAt(fs.Mutations() + op)
	_, err = l.Commit(t.Context())
	return err == nil
}

// TestSalvageMissesNothingThatTheLogNeedNotHave: damage in a log file from before the tree's epoch
// loses nothing, and salvage reports that.
func TestSalvageMissesNothingThatTheLogNeedNotHave(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	s := mustReopen(t, o)
	mustPut(t, s, "a", "1")
	mustClose(t, s) // merged; the next run has a segment of its own
	s = mustReopen(t, o)
	mustPut(t, s, "b", "2")
	fs := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
	_ = s.Close() // on a disk that is gone
	segments, err := wal.Segments(fs, "db")
	if err != nil || len(segments) < 2 {
		t.Fatalf("%v, %+v", err, segments)
	}
	f, err := fs.Open(segments[0].File, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0xff}, 20); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	report, err := inspect.VerifyDir(t.Context(), fs, "db", inspect.VerifyOptions{})
	if err != nil || !report.OK() {
		t.Fatalf("verify: %v, %+v", err, report)
	}
	got, salvaged := mustSalvage(t, fs)
	if err := equalMaps(map[string]string{"a": "1", "b": "2"}, got); err != nil || salvaged.LostTotal > 0 {
		t.Errorf("salvage: %v, %+v", err, salvaged)
	}
}

// TestSalvageReadsTheLogWithoutSuperblocks: nothing tells then to which history the log belongs, and it counts all the same.
func TestSalvageReadsTheLogWithoutSuperblocks(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	s := mustReopen(t, o)
	mustPut(t, s, "a", "in the tree")
	mustPut(t, s, "b", "in the tree")
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "b", "in the log")
	fs := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
	_ = s.Close() // on a disk that is gone
	damageKind(t, nil, fs, o.Storage.PageSize, "superblocks")
	got, report := mustSalvage(t, fs)
	if err := equalMaps(map[string]string{"a": "in the tree", "b": "in the log"}, got); err != nil {
		t.Error(err)
	}
	if report.Epoch != 0 || report.LostTotal != 1 || report.Lost[0].Kind != inspect.DamageSuperblock {
		t.Errorf("%+v", report)
	}
}

// TestSalvageRestoresNothingOfABulkLoadWhoseNumberWasUsedAgain: the checkpoint after an interrupted bulk load has the
// same number, and may leave pages of the bulk load in the file.
func TestSalvageRestoresNothingOfABulkLoadWhoseNumberWasUsedAgain(t *testing.T) {
	for op := int64(1); ; op += 2 {
		o := modelOptions(vfs.NewMem())
		s := mustReopen(t, o)
		want := map[string]string{}
		put := func(i int, v string) {
			mustPut(t, s, fmt.Sprintf("k%03d", i), v)
			want[fmt.Sprintf("k%03d", i)] = v
		}
		for i := range 100 {
			put(i, fmt.Sprint("committed ", i))
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		loaded := loadWithCrash(t, s, o.Storage.FS.(*vfs.Mem), op)
		o.Storage.FS = o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveNone)
		_ = s.Close() // on a disk that is gone
		if loaded {
			return
		}
		s = mustReopen(t, o)
		put(0, "committed again")
		mustClose(t, s)
		damageKind(t, nil, o.Storage.FS, o.Storage.PageSize, "map and inner pages")
		got, report := mustSalvage(t, o.Storage.FS)
		if err := equalMaps(want, got); err != nil {
			t.Fatalf("crash at operation %d: %v; report %+v", op, err, report)
		}
	}
}

// TestSalvageSaysThatKeysOfAFailedBulkLoadMayComeBack: without the allocation map, leaves of a bulk load that was refused are like leaves of the
// state, once a later epoch than that of the load is in it.
func TestSalvageSaysThatKeysOfAFailedBulkLoadMayComeBack(t *testing.T) {
	for _, damage := range []string{"map and inner pages", "superblocks"} {
		o := modelOptions(vfs.NewMem())
		s := mustReopen(t, o)
		later := map[string]string{}
		for i := range 100 {
			mustPut(t, s, fmt.Sprintf("k%03d", i), fmt.Sprint("committed ", i))
			later[fmt.Sprintf("z%03d", i)] = "loaded"
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		l, err := s.BeginBulkLoad()
		if err != nil {
			t.Fatal(err)
		}
		for i := range 100 {
			if err := l.Add(fmt.Appendf(nil, "k%03d", i), fmt.Appendf(nil, "refused %d", i)); err != nil {
				t.Fatal(err)
			}
		}
		refused := errors.New("refused")
		l.Permit(func() error { return refused })
		if _, err := l.Commit(t.Context()); !errors.Is(err, refused) {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		mustLoad(t, s, later)
		mustClose(t, s)
		damageKind(t, nil, o.Storage.FS, o.Storage.PageSize, damage)
		got, report := mustSalvage(t, o.Storage.FS)
		brought := 0
		for _, v := range got {
			if strings.HasPrefix(v, "refused") {
				brought++
			}
		}
		if brought == 0 {
			t.Errorf("%s: the test needs a value of the bulk load", damage)
		}
		if !strings.Contains(strings.Join(report.Notes, "\n"), "deleted keys, or keys of a bulk load that failed, may have come back") {
			t.Errorf("%s: notes %q", damage, report.Notes)
		}
	}
}
