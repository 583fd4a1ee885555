package enginetest

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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
	rebuildSeeds   = flag.Int("rebuild.seeds", 12, "runs of the test that damages several pages of the tree at random")
	rebuildCrashes = flag.Int("rebuild.crashes", 16, "operations at which the test of rebuilding cuts the power")
)

// tallKeys is the number of keys in tallTree.
const tallKeys = 1000

// tallTree has the files of a closed store with a tree of at least four levels, with large values, deleted keys, keys with
// many versions, and pages that earlier checkpoints wrote and that are free now. The store is made once; each caller has a copy.
func tallTree(t testing.TB) (image, map[string]string) {
	t.Helper()
	tallTreeOnce.Do(func() { tallTreeFiles, tallTreeKeys = makeTallTree(t) })
	if tallTreeKeys == nil {
		t.Fatal("the store could not be made")
	}
	files := maps.Clone(tallTreeFiles)
	for name := range files {
		files[name] = slices.Clone(files[name])
	}
	return files, maps.Clone(tallTreeKeys)
}

var (
	tallTreeOnce  sync.Once
	tallTreeFiles image
	tallTreeKeys  map[string]string
)

func makeTallTree(t testing.TB) (image, map[string]string) {
	t.Helper()
	o := modelOptions(vfs.NewMem())
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	x, old := mustSession(t, s), mustSession(t, s)
	rng, want := rand.New(rand.NewPCG(1, 17)), map[string]string{}
	set := func(k, v string) {
		t.Helper()
		if _, err := put(x, k, v, mvcc.DurabilityAsync); err != nil {
			t.Fatal(err)
		}
		want[k] = v
	}
	for round := range 3 {
		for i := range tallKeys {
			k, v := fmt.Sprintf("key-%04d", (i*37+round)%tallKeys), fmt.Sprintf("%d-%d-%s", round, i, strings.Repeat("v", 40+rng.IntN(80)))
			if rng.IntN(40) == 0 {
				v = strings.Repeat("L", 200+rng.IntN(1500))
			}
			set(k, v)
		}
		for range 12 { // versions of one key in several leaves
			set("key-0250", fmt.Sprint(rng.Uint64(), strings.Repeat("m", 80)))
		}
		for i := range 20 {
			k, w := fmt.Sprintf("key-%04d", (i*53+round*7)%tallKeys), mvcc.Write{Durability: mvcc.DurabilityAsync}
			w.Delete([]byte(k))
			if _, err := commitAndWait(x, &w); err != nil {
				t.Fatal(err)
			}
			delete(want, k)
		}
		if round == 1 {
			if _, err := old.OpenSnapshot(0); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	files := mustRead(t, o.Storage.FS)
	x.Close()
	old.Close()
	mustClose(t, s)
	return files, want
}

// innerNodes are the inner nodes of the newest state's tree, by level, and the leaves at level 0.
func innerNodes(t testing.TB, fs vfs.FS) (byLevel [][]page.ID, parents map[page.ID]page.ID) {
	t.Helper()
	p, err := pager.OpenSnapshot(fs, dataFile)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	state := p.State()
	byLevel, parents = make([][]page.ID, state.Height), map[page.ID]page.ID{}
	err = btree.Walk(pageReader{p}, btree.Root{ID: state.Root, Level: int(state.Height) - 1}, &btree.Visitor{
		Page: func(id page.ID, level int, buf []byte) error {
			byLevel[level] = append(byLevel[level], id)
			for i := 0; level > 0 && i < page.Inner(buf).Count(); i++ {
				parents[page.Inner(buf).Child(i)] = id
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return byLevel, parents
}

// rebuildTest opens damaged files.
type rebuildTest struct {
	t        testing.TB
	what     string
	o        mvcc.Options
	snapshot bool // x has one, and reads at it
	s        *mvcc.Store
	x        *session
	want     map[string]string
	reports  chan storage.Rebuild
}

func openDamaged(t testing.TB, fs vfs.FS, want map[string]string, what string) *rebuildTest {
	t.Helper()
	r := &rebuildTest{t: t, what: what, o: modelOptions(fs), want: maps.Clone(want), reports: make(chan storage.Rebuild, 1000)}
	r.o.Storage.OnRebuild = func(b storage.Rebuild) { r.reports <- b }
	s, err := mvcc.Open(r.o)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	r.s, r.x = s, mustSession(t, s)
	return r
}

// readAll reads every key, and fails on a wrong answer. It returns the keys that cannot be read.
func (r *rebuildTest) readAll() (lost []string) {
	r.t.Helper()
	for i := range tallKeys {
		k := fmt.Sprintf("key-%04d", i)
		v, err := r.get(k)
		want, has := r.want[k]
		switch {
		case asDamage(err):
			lost = append(lost, k)
		case err != nil || v.Found != has || string(v.Data) != want:
			r.t.Fatalf("%s: %s is %v %.30q, %v; want %v %.30q", r.what, k, v.Found, v.Data, err, has, want)
		}
	}
	return lost
}

func (r *rebuildTest) get(key string) (mvcc.Value, error) {
	if r.snapshot {
		return r.x.Read(nil, []byte(key))
	}
	return r.x.Get(nil, []byte(key), 0)
}

// await waits until a report for each of so many nodes has come.
func (r *rebuildTest) await(nodes int) (rebuilt, refused []storage.Rebuild) {
	r.t.Helper()
	for range nodes {
		select {
		case b := <-r.reports:
			if b.Children > 0 {
				rebuilt = append(rebuilt, b)
			} else {
				refused = append(refused, b)
			}
		case <-time.After(20 * time.Second):
			r.t.Fatalf("%s: %d nodes rebuilt, %v refused, of %d: %v", r.what, len(rebuilt), refused, nodes, r.s.CheckpointErr())
		}
	}
	return rebuilt, refused
}

// atSnapshot reads at a snapshot of now, which keeps old versions; nil if it is not wanted.
func (r *rebuildTest) atSnapshot(wanted bool) *rebuildTest {
	r.t.Helper()
	if !wanted {
		return nil
	}
	x := mustSession(r.t, r.s)
	if _, err := x.OpenSnapshot(0); err != nil {
		r.t.Fatal(err)
	}
	return &rebuildTest{t: r.t, what: r.what + ", at an old snapshot", x: x, snapshot: true, want: maps.Clone(r.want)}
}

// mustHaveAll reads every key at the snapshot, and closes it.
func (r *rebuildTest) mustHaveAll() {
	if r == nil {
		return
	}
	r.t.Helper()
	if lost := r.readAll(); len(lost) > 0 {
		r.t.Fatalf("%s: %d keys cannot be read", r.what, len(lost))
	}
	r.x.Close()
}

// writeAll changes keys all over the tree.
func (r *rebuildTest) writeAll() {
	r.t.Helper()
	for i := 0; i < tallKeys; i += 13 {
		k, v := fmt.Sprintf("key-%04d", i), fmt.Sprintf("again-%d-%s", i, strings.Repeat("w", i%60))
		if _, err := put(r.x, k, v, mvcc.DurabilitySync); err != nil {
			r.t.Fatalf("%s: %v", r.what, err)
		}
		r.want[k] = v
	}
	if err := r.s.Checkpoint(context.Background()); err != nil {
		r.t.Fatalf("%s: %v", r.what, err)
	}
}

// awaitNoDamage waits until no damage is reported: a node is reported as rebuilt just before the damage is taken back.
func (r *rebuildTest) awaitNoDamage() {
	r.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); r.s.Damage() != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: still reported: %v", r.what, r.s.Damage())
		}
	}
}

// mustBeWhole checks that the store is as if nothing had been damaged, now and after a restart.
func (r *rebuildTest) mustBeWhole() {
	r.t.Helper()
	if lost := r.readAll(); len(lost) > 0 {
		r.t.Fatalf("%s: %d keys cannot be read, %v", r.what, len(lost), r.s.Damage())
	}
	r.awaitNoDamage()
	if got := dump(r.t, r.s); !maps.Equal(got, r.want) {
		r.t.Fatalf("%s: a scan has %d keys of %d", r.what, len(got), len(r.want))
	}
	r.x.Close()
	mustClose(r.t, r.s)
	again := openDamaged(r.t, r.o.Storage.FS, r.want, r.what+", after a restart")
	if lost := again.readAll(); len(lost) > 0 {
		r.t.Fatalf("%s: %d keys cannot be read", again.what, len(lost))
	}
	again.close()
}

func (r *rebuildTest) close() {
	r.t.Helper()
	r.x.Close()
	if err := r.s.Close(); err != nil {
		r.t.Fatalf("%s: close: %v", r.what, err)
	}
}

// overwrite damages a page: its bytes are gone, or one bit of them is wrong.
func overwrite(data []byte, id page.ID, bit int) {
	p := data[int(id)*512 : int(id+1)*512]
	if bit < 0 {
		clear(p)
		return
	}
	p[bit/8] ^= 1 << (bit % 8)
}

// TestDamagedInnerNodesAreRebuilt damages every inner node in turn, the root among them. A read that meets it, or a write,
// has it rebuilt: every key is read, and the files are as if nothing had happened.
func TestDamagedInnerNodesAreRebuilt(t *testing.T) {
	files, want := tallTree(t)
	clean := files[dataFile]
	byLevel, _ := innerNodes(t, files.files(t))
	if len(byLevel) < 4 {
		t.Fatalf("the tree has %d levels: the test tests too little", len(byLevel))
	}
	rng := rand.New(rand.NewPCG(testseed.Base(t), 3))
	n := 0
	for level := 1; level < len(byLevel); level++ {
		for _, id := range byLevel[level] {
			if n++; level == 1 && n%exhaustiveStep > 0 {
				continue
			}
			files[dataFile] = slices.Clone(clean)
			bit := -1
			if n%2 == 0 {
				bit = rng.IntN(512 * 8)
			}
			overwrite(files[dataFile], id, bit)
			r := openDamaged(t, files.files(t), want, fmt.Sprintf("page %d of level %d, bit %d", id, level, bit))
			before := r.atSnapshot(n%2 == 0)
			if n%3 == 0 {
				r.writeAll()
			}
			if lost := r.readAll(); len(lost) > 0 && n%3 == 1 {
				mustPut(t, r.s, lost[0], "written while it could not be read")
				r.want[lost[0]] = "written while it could not be read"
			}
			rebuilt, refused := r.await(1)
			if len(refused) > 0 || rebuilt[0].Page != uint64(id) || rebuilt[0].Level != level {
				t.Fatalf("%s: rebuilt %+v, refused %+v", r.what, rebuilt, refused)
			}
			r.writeAll()
			before.mustHaveAll()
			r.mustBeWhole()
		}
	}
}

// TestSeveralDamagedPagesOfTheTree damages several pages of the tree at random: parents and their children, neighbours, leaves
// below damaged nodes. Every answer is right or DATA_LOSS. A node is rebuilt, or refused with a reason. Of rebuilt nodes only
// the keys in damaged leaves are lost, and without damaged leaves nothing is.
func TestSeveralDamagedPagesOfTheTree(t *testing.T) {
	files, want := tallTree(t)
	clean := files[dataFile]
	byLevel, parents := innerNodes(t, files.files(t))
	below := keysBelow(t, files.files(t))
	base, whole, partly, refusals := testseed.Base(t), 0, 0, 0
	most := max(*rebuildSeeds/exhaustiveStep, 6)
	// What becomes of a run depends on its seed, so there are more runs until there is one of each kind.
	for run := 0; run < most || run < 20*most && (whole == 0 || partly == 0); run++ {
		seed := base + uint64(run)
		rng := rand.New(rand.NewPCG(seed, 4))
		d := damageTree(rng, byLevel, parents)
		files[dataFile] = slices.Clone(clean)
		for id, bit := range d.bits {
			overwrite(files[dataFile], id, bit)
		}
		r := openDamaged(t, files.files(t), want, fmt.Sprintf("seed %d, damage %v", seed, d.bits))
		if rng.IntN(2) == 0 {
			r.writeAll()
		}
		refused := r.awaitSearch(func(k string) bool { // a key that was deleted may be in the range of a damaged leaf
			_, has := want[k]
			return !has && len(d.leaves) > 0 || slices.ContainsFunc(d.leaves, func(id page.ID) bool { return below[id][k] })
		})
		r.writeAll()
		r.readAll()
		switch {
		case refused:
			refusals++
			r.close()
		case len(d.leaves) > 0:
			partly++
			r.close()
		default:
			whole++
			r.mustBeWhole()
		}
	}
	t.Logf("%d whole, %d but for leaves, %d with refused nodes", whole, partly, refusals)
	if whole == 0 || partly == 0 {
		t.Error("the test tests too little")
	}
}

// treeDamage says which bit of a page is wrong; of all bits, if it is negative.
type treeDamage struct {
	bits   map[page.ID]int
	leaves []page.ID
}

func damageTree(rng *rand.Rand, byLevel [][]page.ID, parents map[page.ID]page.ID) treeDamage {
	d := treeDamage{bits: map[page.ID]int{}}
	bit := func() int {
		if rng.IntN(3) == 0 {
			return -1
		}
		return rng.IntN(512 * 8)
	}
	top := len(byLevel) - 1
	switch rng.IntN(4) {
	case 0: // a node and its parents
		for id := byLevel[1][rng.IntN(len(byLevel[1]))]; id != 0 && len(d.bits) < 2+rng.IntN(2); id = parents[id] {
			d.bits[id] = bit()
		}
	case 1: // several nodes
		for range 2 + rng.IntN(3) {
			level := 1 + rng.IntN(top)
			d.bits[byLevel[level][rng.IntN(len(byLevel[level]))]] = bit()
		}
	case 2: // leaves and their parent, which can be read but for a bit
		for range 1 + rng.IntN(3) {
			leaf := byLevel[0][rng.IntN(len(byLevel[0]))]
			d.leaves = append(d.leaves, leaf)
			d.bits[leaf], d.bits[parents[leaf]] = bit(), 8*120+rng.IntN(100)
		}
	default:
		leaf := byLevel[0][rng.IntN(len(byLevel[0]))]
		d.leaves = append(d.leaves, leaf)
		d.bits[leaf] = bit()
		for id := parents[leaf]; id != 0; id = parents[id] {
			if rng.IntN(2) == 0 {
				d.bits[id] = bit()
			}
		}
	}
	return d
}

// awaitSearch reads until nothing is lost but what may be lost, or a node is refused, and reports which of the two.
func (r *rebuildTest) awaitSearch(mayLose func(string) bool) (refused bool) {
	r.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		lost := slices.DeleteFunc(r.readAll(), mayLose)
		for len(r.reports) > 0 {
			if b := <-r.reports; b.Children == 0 {
				r.t.Logf("%s: page %d stays lost: %s", r.what, b.Page, b.Reason)
				refused = true
			}
		}
		if refused || len(lost) == 0 {
			return refused
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: %d keys are lost, and in no damaged leaf", r.what, len(lost))
		}
	}
}

// TestRebuildingSurvivesACrashAtEveryOperation cuts the power at each operation of a store that skips a damaged node, writes
// into its range, and rebuilds it.
func TestRebuildingSurvivesACrashAtEveryOperation(t *testing.T) {
	files, want := tallTree(t)
	byLevel, parents := innerNodes(t, files.files(t))
	node := byLevel[1][len(byLevel[1])/2]
	overwrite(files[dataFile], node, -1)
	overwrite(files[dataFile], parents[node], -1)
	damaged := files

	// script writes, and waits until everything can be read; it says what was acknowledged, and how many nodes were rebuilt.
	script := func(fs *vfs.Mem) (acked map[string]string, rebuilt int, ops int64) {
		acked = map[string]string{}
		before, o, reports := fs.Mutations(), modelOptions(fs), make(chan storage.Rebuild, 100)
		o.Storage.OnRebuild = func(b storage.Rebuild) { reports <- b }
		s, err := mvcc.Open(o)
		if err != nil {
			return acked, 0, 0
		}
		x := mustSession(t, s)
		for i := 0; i < tallKeys; i += 97 {
			k := fmt.Sprintf("key-%04d", i)
			if _, err := put(x, k, "new", mvcc.DurabilitySync); err == nil {
				acked[k] = "new"
			}
		}
		for whole := false; !whole && !fs.Crashed(); {
			whole = isReadable(x)
			_ = s.Checkpoint(context.Background()) // after the one that rebuilt nodes has reported them
			for ; len(reports) > 0; rebuilt++ {
				<-reports
			}
		}
		x.Close()
		_ = s.Close()
		return acked, rebuilt, fs.Mutations() - before
	}
	var rebuilt int
	var ops int64
	for attempts := 0; rebuilt < 2; attempts++ {
		if attempts == 10 {
			t.Fatalf("%d nodes rebuilt", rebuilt)
		}
		files = written(t, damaged, want) // a slow run may have rebuilt them already
		_, rebuilt, ops = script(files.files(t))
	}
	step := max(ops*exhaustiveStep/int64(*rebuildCrashes), 1)
	for k := 1 + int64(testseed.Base(t))%step; k <= ops; k += step {
		fs := files.files(t)
		fs.CrashAt(fs.Mutations() + k)
		acked, _, _ := script(fs)
		left := fs.Crash(uint64(k), []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}[k%3])
		r := openDamaged(t, left, want, fmt.Sprintf("crash at operation %d of %d", k, ops))
		r.mayHave(acked)
		if r.awaitSearch(func(string) bool { return false }) {
			t.Fatalf("%s: a node was refused", r.what)
		}
		r.mustBeWhole()
	}
}

// isReadable reports whether the range of no key is lost.
func isReadable(x *session) bool {
	for i := range tallKeys {
		if _, err := x.Get(nil, fmt.Appendf(nil, "key-%04d", i), 0); err != nil {
			return false
		}
	}
	return true
}

// written has the files of a killed store that has keys for each part of the tree in its log, some with large values.
func written(t testing.TB, files image, want map[string]string) image {
	t.Helper()
	o := modelOptions(files.files(t))
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < tallKeys; i += 61 {
		k, v := fmt.Sprintf("key-%04d", i), fmt.Sprintf("written-%d", i)+strings.Repeat("S", i*2)
		mustPut(t, s, k, v)
		want[k] = v
	}
	left := mustRead(t, o.Storage.FS)
	_ = s.Close() // its checkpoint is not in the files
	return left
}

// mayHave takes over which of the acknowledged values the store has: all of them.
func (r *rebuildTest) mayHave(acked map[string]string) {
	r.t.Helper()
	for k, v := range acked {
		r.want[k] = v
	}
	for i := 0; i < tallKeys; i += 97 { // of an operation that was under way, either
		k := fmt.Sprintf("key-%04d", i)
		if v, err := r.x.Get(nil, []byte(k), 0); err == nil && acked[k] == "" && string(v.Data) == "new" {
			r.want[k] = "new"
		}
	}
}

// TestOldStatesAreNotMixedIntoARebuiltNode: a verification holds the pages of an old state while the tree is written anew,
// with deletions, and its root is damaged. No page of the old state comes back.
func TestOldStatesAreNotMixedIntoARebuiltNode(t *testing.T) {
	files, want := tallTree(t)
	fs := files.files(t)
	r := openDamaged(t, fs, want, "an old state is pinned")
	reached, goOn, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		once := false
		report, err := r.s.Verify(context.Background(), inspect.VerifyOptions{Progress: func(inspect.VerifyProgress) {
			if !once {
				once = true
				close(reached)
				<-goOn
			}
		}})
		if err == nil && !report.OK() {
			err = fmt.Errorf("%+v", report.Damages)
		}
		done <- err
	}()
	<-reached
	for round := range 2 { // leaves vanish, others move
		for i := round; i < tallKeys; i += 2 {
			k, w := fmt.Sprintf("key-%04d", i), mvcc.Write{Durability: mvcc.DurabilityAsync}
			if i%5 > 0 {
				w.Delete([]byte(k))
				delete(r.want, k)
			} else {
				w.Set([]byte(k), []byte("young"))
				r.want[k] = "young"
			}
			if _, err := commitAndWait(r.x, &w); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	r.damageRoot(fs)
	close(goOn)
	if err := <-done; err != nil {
		t.Errorf("the pinned state: %v", err)
	}
	r.mustBeWhole()
}

// damageRoot damages the root until a merge has met that, and it is rebuilt. A merge in the background that has begun before writes
// another root.
func (r *rebuildTest) damageRoot(fs vfs.FS) {
	r.t.Helper()
	damaged := map[uint64]bool{}
	for range 10 {
		root, err := newestRoot(fs)
		if err == nil {
			err = flipByte(fs, int64(root)*512+20)
		}
		if err != nil { // the file was changed, or became shorter, while it was read
			r.t.Log(err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		damaged[uint64(root)] = true
		r.s.Verify(context.Background(), inspect.VerifyOptions{}) //nolint:errcheck // whatever it says
		r.writeAll()
		select {
		case b := <-r.reports:
			if b.Children == 0 || !damaged[b.Page] {
				r.t.Fatalf("rebuilt %+v", b)
			}
			return
		case <-time.After(4 * time.Second):
		}
	}
	r.t.Fatal("no merge has met the damage")
}

// TestNoNodeIsRebuiltFromAnInexactMap: the allocation map was rebuilt although an inner node could not be read, so that all
// pages count as live, those of older states among them. Nothing can be proved.
func TestNoNodeIsRebuiltFromAnInexactMap(t *testing.T) {
	files, want := tallTree(t)
	byLevel, _ := innerNodes(t, files.files(t))
	clean := files[dataFile]
	for id := 0; (id+1)*512 <= len(clean); id++ {
		if p := clean[id*512 : (id+1)*512]; page.ReadHeader(p).Type == page.TypeArray && p[32] == 1 { // a page of the map
			clean[id*512+100] ^= 1
		}
	}
	overwrite(clean, byLevel[1][1], -1)
	r := openDamaged(t, files.files(t), want, "map and node")
	lost := r.readAll()
	if _, refused := r.await(1); len(refused) == 0 || !strings.Contains(refused[0].Reason, "allocation map") {
		t.Fatalf("refused: %+v", refused)
	}
	r.writeAll()
	if after := r.readAll(); len(lost) == 0 || len(after) == 0 || len(after) >= len(lost) {
		t.Errorf("%d keys were lost, %d are after writes: the test tests nothing", len(lost), len(after))
	}
	if err := r.s.Damage(); err == nil || !strings.Contains(err.Error(), "cannot be rebuilt") {
		t.Errorf("reported: %v", err)
	}
	r.close()
}
