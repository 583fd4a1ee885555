package enginetest

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	iofs "io/fs"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var (
	flipSeed  = flag.Uint64("flip.seed", 1, "seed of the bits that the flip test turns")
	flipEvery = flag.Int("flip.every", 2, "of so many pages the flip test turns a bit in one")
)

// answers has the result of reading each key: its value, or that it cannot be read.
type answers map[string]string

const answerLost = "\x00lost"

// ask opens the files and reads all keys, some of which were deleted. A scan must agree with the
// reads.
func ask(t *testing.T, files image, all []string) (answers, storage.Recovery, error) {
	t.Helper()
	s, err := mvcc.Open(modelOptions(files.files(t)))
	if err != nil {
		return nil, storage.Recovery{}, err
	}
	defer func() { _ = s.Close() }() // its last checkpoint may meet the damage
	x := mustSession(t, s)
	defer x.Close()
	said := answers{}
	for _, k := range all {
		switch v, err := x.Get(nil, []byte(k), 0); {
		case asDamage(err):
			said[k] = answerLost
		case err != nil:
			t.Fatalf("get %q: %v", k, err)
		case v.Found:
			said[k] = string(v.Data)
		}
	}
	return said, s.Recovery(), nil
}

// killed has the files of a store that was killed while it wrote, and every key that it ever had.
// With beside, two pages of its tree were damaged before, a leaf and an inner node, so that there
// is a repair tree.
func killed(t *testing.T, beside bool) (image, []string) {
	t.Helper()
	files, want := damageable(t)
	all := slices.Collect(maps.Keys(want))
	for i := range 60 {
		all = append(all, fmt.Sprintf("key-%03d", i))
	}
	slices.Sort(all)
	all = slices.Compact(all)
	if !beside {
		return files, all
	}
	o := modelOptions(files.files(t))
	for id := range keysBelow(t, o.Storage.FS) {
		if p := files[dataFile][int(id)*512:]; page.IsTree(p[:512], 0) && id%5 == 0 {
			flip(t, o.Storage.FS, int64(id)*512+100)
		}
	}
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	for round := range 2 {
		for i := round; i < 60; i += 2 {
			k := fmt.Sprintf("key-%03d", i)
			if _, err := put(x, k, fmt.Sprintf("beside-%d-%s", round, strings.Repeat("w", i%70)), mvcc.DurabilitySync); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if s.Stats().Storage.Damage.SkippedPages == 0 {
		t.Fatal("no page was skipped: the test tests nothing")
	}
	x.Close()
	files = mustRead(t, o.Storage.FS)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return files, all
}

// keysBelow is the client keys below each page of the newest state's trees.
func keysBelow(t *testing.T, fs vfs.FS) map[page.ID]map[string]bool {
	t.Helper()
	p, err := pager.OpenSnapshot(fs, dataFile)
	if err != nil {
		t.Fatal(err)
	}
	state := p.State()
	below := map[page.ID]map[string]bool{}
	roots := []btree.Root{{ID: state.Root, Level: int(state.Height) - 1}}
	for _, at := range []int{0, 12} { // the repair tree and its mirror
		if id := binary.LittleEndian.Uint64(state.Engine[at:]); id != 0 {
			roots = append(roots, btree.Root{ID: page.ID(id), Level: int(state.Engine[at+8]) - 1})
		}
	}
	for _, root := range roots {
		path := make([]page.ID, root.Level+1) // by level
		err = btree.Walk(pageReader{p}, root, &btree.Visitor{
			Page: func(id page.ID, level int, buf []byte) error {
				path[level], below[id] = id, map[string]bool{}
				if level > 0 {
					return nil
				}
				v := page.Leaf(buf).Layout()
				key := []byte{}
				for i := range v.Count() {
					if s := v.Suffix(i); i == 0 || len(s) > 0 {
						key = slices.Concat(v.Prefix(), s)
					}
					if keys.SpaceOf(key) != keys.SpaceUser {
						continue
					}
					for _, id := range path {
						below[id][string(keys.User(key))] = true
					}
				}
				return nil
			},
			Damaged: func(page.ID, int, *page.Separator, *page.Separator, error) error { return nil },
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	return below
}

// TestFlippedBitCostsItsPageAtMost flips a bit in each page in turn of a store that was killed. The
// store starts. Every key reads as before, except that keys in the page, or below it, may be
// unreadable. Salvage restores all keys that are not in the page itself. No damage is reported for
// the log.
func TestFlippedBitCostsItsPageAtMost(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, beside := range []bool{false, true} {
		t.Run(fmt.Sprintf("beside=%t", beside), func(t *testing.T) {
			files, all := killed(t, beside)
			clean := files[dataFile]
			want, _, err := ask(t, files, all)
			if err != nil {
				t.Fatal(err)
			}
			f := &flipped{t: t, all: all, want: want, below: keysBelow(t, files.files(t)), hit: map[page.Type]int{}}
			f.salvaged, _ = mustSalvage(t, files.files(t))
			rng := rand.New(rand.NewPCG(*flipSeed, 1))
			for id := 0; (id+1)*512 <= len(clean); id++ {
				h := page.ReadHeader(clean[id*512:])
				many := h.Type == page.TypeLeaf || h.Type == page.TypeOverflow || h.Type == 0
				if many && id%*flipEvery != 0 {
					continue
				}
				bit := rng.IntN(512 * 8)
				data := slices.Clone(clean)
				data[id*512+bit/8] ^= 1 << (bit % 8)
				files[dataFile] = data
				f.check(files, page.ID(id), h.Type, fmt.Sprintf("page %d of type %d, bit %d (-flip.seed %d)", id, h.Type, bit, *flipSeed))
				if t.Failed() {
					return
				}
			}
			for kind := page.TypeLeaf; kind <= page.TypeOverflow; kind++ {
				if f.hit[kind] == 0 {
					t.Errorf("no page of type %d was hit", kind)
				}
			}
		})
	}
}

type flipped struct {
	t        *testing.T
	all      []string
	want     answers
	below    map[page.ID]map[string]bool
	salvaged map[string]string
	hit      map[page.Type]int
}

func (f *flipped) check(files image, id page.ID, kind page.Type, what string) {
	t := f.t
	t.Helper()
	f.hit[kind]++
	report, err := inspect.VerifyDir(context.Background(), files.files(t), "db", inspect.VerifyOptions{})
	if err != nil {
		t.Fatalf("%s: verify: %v", what, err)
	}
	values := map[string]bool{} // that verification says to be lost
	for _, d := range report.Damages {
		if d.Kind == inspect.DamageLog {
			t.Errorf("%s: verification reports damage of the log: %+v", what, d)
		}
		if d.Kind == inspect.DamageValue {
			values[string(d.KeyLower)] = true
		}
	}
	got, recovery, err := ask(t, files, f.all)
	if err != nil {
		t.Errorf("%s: the store does not start: %v", what, err)
		return
	}
	isValue := kind == page.TypeBlobs || kind == page.TypeOverflow
	for _, k := range f.all {
		mayLose := f.inRange(id, k) || isValue && values[k]
		if got[k] != f.want[k] && (got[k] != answerLost || !mayLose) {
			t.Errorf("%s: %q is %.30q, and was %.30q; %v", what, k, got[k], f.want[k], recovery.Repaired)
		}
	}
	found := slices.ContainsFunc(report.Damages, func(d inspect.Damage) bool {
		return d.Kind == inspect.DamageSuperblock || d.Kind == inspect.DamageAllocationMap || d.Kind == inspect.DamageBlobs
	})
	if found != (len(recovery.Repaired) > 0) {
		t.Errorf("%s: verification found %+v, the start repaired %q", what, report.Damages, recovery.Repaired)
	}
	out, _ := mustSalvage(t, files.files(t))
	for k, v := range f.salvaged {
		mayLose := kind == page.TypeLeaf && f.below[id][k] || isValue && values[k]
		if out[k] != v && (out[k] != "" || !mayLose) {
			t.Errorf("%s: salvage: %q is %.30q, and was %.30q", what, k, out[k], v)
		}
	}
	for k := range out {
		if _, ok := f.salvaged[k]; !ok {
			t.Errorf("%s: salvage restored the deleted key %q", what, k)
		}
	}
}

// TestVerifyReportsADamagedMapBesideLostReferences: values whose references cannot be read are
// missing in the accounts, and that is no reason to report less of a damaged allocation map.
func TestVerifyReportsADamagedMapBesideLostReferences(t *testing.T) {
	files, _ := killed(t, false)
	clean := files[dataFile]
	for id, below := range keysBelow(t, files.files(t)) {
		if at := int(id) * 512; below["large-3"] && page.ReadHeader(clean[at:]).Type == page.TypeLeaf {
			clean[at+100] ^= 1
		}
	}
	maps := 0
	for id := 0; (id+1)*512 <= len(clean); id++ {
		if page.ReadHeader(clean[id*512:]).Type != page.TypeArray {
			continue
		}
		data := slices.Clone(clean)
		data[id*512+100] ^= 1
		files[dataFile] = data
		report, err := inspect.VerifyDir(context.Background(), files.files(t), "db", inspect.VerifyOptions{})
		if err != nil {
			t.Errorf("page %d: %v", id, err)
			continue
		}
		if slices.ContainsFunc(report.Damages, func(d inspect.Damage) bool { return d.Kind == inspect.DamageAllocationMap }) {
			maps++
		}
	}
	if maps == 0 {
		t.Error("no page of the allocation map was hit")
	}
}

// inRange reports whether a page has the key, or would have it: the key was deleted, and the page
// has one of its neighbours.
func (f *flipped) inRange(id page.ID, key string) bool {
	if f.below[id][key] {
		return true
	}
	i, _ := slices.BinarySearch(f.all, key)
	for _, step := range []int{-1, 1} {
		for n := i; n >= 0 && n < len(f.all) && f.want[f.all[i]] == ""; n += step {
			if f.below[id][f.all[n]] {
				return true
			}
			if f.want[f.all[n]] != "" {
				break
			}
		}
	}
	return false
}

// TestTruncatedDataFileIsRefusedWithARemedy: for a truncation at any page boundary.
func TestTruncatedDataFileIsRefusedWithARemedy(t *testing.T) {
	files, all := killed(t, false)
	clean := files[dataFile]
	want, _, err := ask(t, files, all)
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	for size := 0; size < len(clean); size += 512 {
		files[dataFile] = slices.Clone(clean[:size])
		got, _, err := ask(t, files, all)
		if err == nil { // only space that nothing uses was cut
			if !maps.Equal(got, want) {
				t.Fatalf("opened %d bytes of %d with other contents", size, len(clean))
			}
			continue
		}
		refused++
		var damage *storage.CorruptionError
		if !errors.As(err, &damage) || !strings.Contains(damage.Error(), "data.ekv") || !strings.Contains(damage.Remedy, "salvage") {
			t.Fatalf("%d bytes: %v", size, err)
		}
	}
	if refused < 40 {
		t.Fatalf("%d sizes were refused", refused)
	}
	files[dataFile] = append(slices.Clone(clean), []byte(strings.Repeat("garbage!", 1000))...)
	if got, _, err := ask(t, files, all); err != nil || !maps.Equal(got, want) {
		t.Fatalf("with random bytes appended: %v", err)
	}
}

// TestMissingDataFileIsNotCreatedForItsLog: the log is intact, so the start is refused instead of a
// repair, and nothing is created. A truncated segment that is still there under its old name, while later ones were used
// again, does not make a log whole.
func TestMissingDataFileIsNotCreatedForItsLog(t *testing.T) {
	whole := logOnly(t)
	segments := segmentNames(whole)
	if len(segments) < 4 {
		t.Fatalf("segments: %q", segments)
	}
	for _, gone := range []int{0, 1, 2} {
		files := maps.Clone(whole)
		delete(files, segments[gone])
		disk := files.files(t)
		_, err := mvcc.Open(modelOptions(disk))
		var damage *storage.CorruptionError
		if !errors.As(err, &damage) || damage.File != dataFile || !strings.Contains(damage.Reason, "missing") {
			t.Fatalf("without %s: %v", segments[gone], err)
		}
		if _, err := disk.Size(dataFile); !errors.Is(err, iofs.ErrNotExist) {
			t.Fatalf("without %s: the data file: %v", segments[gone], err)
		}
	}
	s := mustOpen(t, modelOptions(whole.files(t)))
	if got := len(dump(t, s)); got != 200 {
		t.Fatalf("the whole log brought %d keys", got)
	}
}

// logOnly is the files of a store that never merged, without the data file.
func logOnly(t *testing.T) image {
	t.Helper()
	o := modelOptions(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.CheckpointBytes = 1<<20, 16<<20
	s := mustOpen(t, o)
	for i := range 200 {
		mustPut(t, s, fmt.Sprintf("key-%03d", i), strings.Repeat("v", 600))
	}
	files := mustRead(t, o.Storage.FS)
	delete(files, dataFile)
	return files
}
