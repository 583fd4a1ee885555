package enginetest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

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

var sideSeeds = flag.Int("side.seeds", 12, "runs of the test with random damage")

// TestWritesGoOnThoughEveryLeafIsDamaged: checkpoints skip damaged pages. Later writes, deletions
// included, can be read before and after a restart. All other keys are DATA_LOSS. Salvage restores
// all keys that can be read.
func TestWritesGoOnThoughEveryLeafIsDamaged(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemoryBytes = 4 << 20
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 400 {
		mustPut(t, s, fmt.Sprintf("k%03d", i), strings.Repeat("v", 100))
	}
	mustClose(t, s)
	damageLeaves(t, o.Storage.FS, 8192, 1)
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	x := mustSession(t, s)
	for i := range 20_000 { // many times what memory holds
		k, v := fmt.Sprintf("k%03d", i%200), fmt.Sprintf("%d-%s", i, strings.Repeat("w", 1000))
		if _, err := put(x, k, v, mvcc.DurabilityAsync); err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
		want[k] = v
	}
	for i := 0; i < 200; i += 10 {
		k := fmt.Sprintf("k%03d", i)
		w := mvcc.Write{Durability: mvcc.DurabilitySync}
		w.Delete([]byte(k))
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		want[k] = ""
	}
	check := func() {
		t.Helper()
		for i := range 400 {
			k := fmt.Sprintf("k%03d", i)
			v, err := x.Get(nil, []byte(k), 0)
			switch {
			case i >= 200 && !asDamage(err):
				t.Fatalf("%s, which is on a damaged page: %v %.20q, %v", k, v.Found, v.Data, err)
			case i < 200 && (err != nil || v.Found != (want[k] != "") || string(v.Data) != want[k]):
				t.Fatalf("%s: %v %.20q, %v; want %.20q", k, v.Found, v.Data, err, want[k])
			}
		}
		checkRefusedScan(t, x)
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	check()
	if st := s.Stats().Storage; st.Damage.SkippedPages == 0 || len(st.Generations) != 1 {
		t.Errorf("%d skipped pages, %d generations", st.Damage.SkippedPages, len(st.Generations))
	}
	x.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	report, err := inspect.VerifyDir(context.Background(), o.Storage.FS, "db", inspect.VerifyOptions{})
	if err != nil || report.OK() || report.Damages[0].Kind != inspect.DamagePage || len(report.Notes) == 0 {
		t.Errorf("verify: %v, %+v", err, report)
	}
	got, _ := mustSalvage(t, o.Storage.FS)
	maps.DeleteFunc(want, func(_, v string) bool { return v == "" })
	if err := equalMaps(want, got); err != nil {
		t.Errorf("salvage: %v", err)
	}
	for i := 0; i < 200; i += 10 {
		want[fmt.Sprintf("k%03d", i)] = ""
	}
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	x = mustSession(t, s)
	check()
	x.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func checkRefusedScan(t *testing.T, x *session) {
	t.Helper()
	for _, reverse := range []bool{false, true} {
		if _, err := x.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		c, err := x.Scan(mvcc.ScanOptions{Reverse: reverse})
		if err != nil {
			t.Fatal(err)
		}
		for c.Next() {
		}
		if !asDamage(c.Err()) {
			t.Fatalf("a scan over damage, reverse %v: %v", reverse, c.Err())
		}
		c.Close()
		x.CloseSnapshot()
	}
}

func mustSalvage(t testing.TB, fs vfs.FS) (map[string]string, *inspect.SalvageReport) {
	t.Helper()
	all, report := mustSalvageAll(t, fs)
	got := map[string]string{}
	for k, e := range all {
		got[k] = string(e.Value)
	}
	return got, report
}

// mustSalvageAll is mustSalvage with what the versions say beside the values.
func mustSalvageAll(t testing.TB, fs vfs.FS) (map[string]inspect.Salvaged, *inspect.SalvageReport) {
	t.Helper()
	got := map[string]inspect.Salvaged{}
	report, err := inspect.Salvage(context.Background(), fs, "db", func(e *inspect.Salvaged) error {
		if _, twice := got[string(e.Key)]; twice {
			return fmt.Errorf("%q comes out twice", e.Key)
		}
		got[string(e.Key)] = inspect.Salvaged{Value: bytes.Clone(e.Value), Epoch: e.Epoch, Metadata: e.Metadata}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return got, report
}

// damageUserLeaves damages every intact leaf that begins with a client's key, and returns their
// offsets.
func damageUserLeaves(t testing.TB, fs vfs.FS, pageSize int) (flipped []int64) {
	t.Helper()
	file := readFile(t, fs, dataFile)
	for id := 2; (id+1)*pageSize <= len(file); id++ {
		p := file[id*pageSize : (id+1)*pageSize]
		if page.Check(p, page.ID(id)) != nil || !page.IsTree(p, 0) {
			continue
		}
		v := page.Leaf(p).Layout()
		if key := slices.Concat(v.Prefix(), v.Suffix(0)); keys.SpaceOf(key) == keys.SpaceUser {
			flipped = append(flipped, int64(id*pageSize+100))
			flip(t, fs, flipped[len(flipped)-1])
		}
	}
	return flipped
}

// treePages lists the readable pages of the newest state's tree, without those of the repair tree.
func treePages(t testing.TB, fs vfs.FS) (ids []page.ID) {
	t.Helper()
	p, err := pager.OpenSnapshot(fs, dataFile)
	if err != nil {
		t.Fatal(err)
	}
	state := p.State()
	err = btree.Walk(pageReader{p}, btree.Root{ID: state.Root, Level: int(state.Height) - 1}, &btree.Visitor{
		Page:    func(id page.ID, _ int, _ []byte) error { ids = append(ids, id); return nil },
		Damaged: func(page.ID, int, *page.Separator, *page.Separator, error) error { return nil },
	})
	if err := errors.Join(err, p.Close()); err != nil {
		t.Fatal(err)
	}
	return ids
}

// valuePages lists the pages of large values, including those without a reference.
func valuePages(t testing.TB, fs vfs.FS, pageSize int) (ids []page.ID) {
	t.Helper()
	file := readFile(t, fs, dataFile)
	for id := 2; (id+1)*pageSize <= len(file); id++ {
		p := file[id*pageSize : (id+1)*pageSize]
		if h := page.ReadHeader(p); page.Check(p, page.ID(id)) == nil && (h.Type == page.TypeBlobs || h.Type == page.TypeOverflow) {
			ids = append(ids, page.ID(id))
		}
	}
	return ids
}

type pageReader struct{ *pager.Snapshot }

func (r pageReader) Page(id page.ID, _ int) ([]byte, error) {
	p := make([]byte, r.PageSize())
	return p, r.ReadPage(id, p)
}

func flip(t testing.TB, fs vfs.FS, at int64) {
	t.Helper()
	if err := flipByte(fs, at); err != nil {
		t.Fatal(err)
	}
}

func flipByte(fs vfs.FS, at int64) error {
	f, err := fs.Open(dataFile, vfs.ReadWrite)
	if err != nil {
		return err
	}
	var b [1]byte
	if _, err = f.ReadAt(b[:], at); err == nil {
		b[0] ^= 1
		_, err = f.WriteAt(b[:], at)
	}
	return errors.Join(err, f.Sync(), f.Close())
}

// TestPagesThatBecomeReadableAgainShowTheirKeys: when the device can read the pages again, their
// keys can be read and scanned, and later writes remain.
func TestPagesThatBecomeReadableAgainShowTheirKeys(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for i := range 200 {
		k, v := fmt.Sprintf("k%03d", i), fmt.Sprintf("%d-%s", i, strings.Repeat("v", i%90))
		mustPut(t, s, k, v)
		want[k] = v
	}
	mustClose(t, s)
	flipped := damageUserLeaves(t, o.Storage.FS, o.Storage.PageSize)
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	for i := 0; i < 200; i += 3 {
		k := fmt.Sprintf("k%03d", i)
		w := mvcc.Write{Durability: mvcc.DurabilitySync}
		if delete(want, k); i%2 == 0 {
			w.Delete([]byte(k))
		} else {
			w.Set([]byte(k), []byte("new"))
			want[k] = "new"
		}
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
	}
	x.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, at := range flipped {
		flip(t, o.Storage.FS, at)
	}
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	x = mustSession(t, s)
	for i := range 200 {
		k := fmt.Sprintf("k%03d", i)
		if v, err := x.Get(nil, []byte(k), 0); err != nil || v.Found != (want[k] != "") || string(v.Data) != want[k] {
			t.Fatalf("%s: %v %q, %v; want %q", k, v.Found, v.Data, err, want[k])
		}
	}
	x.Close()
	for end := time.Now().Add(30 * time.Second); s.Stats().Storage.Damage.SkippedPages > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("pages that can be read again are still skipped")
		}
	}
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Error(err)
	}
	mustClose(t, s) // sound, and the accounts add up
	got, report := mustSalvage(t, o.Storage.FS)
	if err := equalMaps(want, got); err != nil || report.LostTotal != 0 {
		t.Errorf("salvage: %v, %d lost", err, report.LostTotal)
	}
}

// TestSalvageRestoresNothingSupersededWithADamagedRepairTree: the tree's versions of keys that are
// newer in the repair tree are superseded, even if their pages can be read again.
func TestSalvageRestoresNothingSupersededWithADamagedRepairTree(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	key := func(i int) string { return fmt.Sprintf("k%03d", i) }
	run := func(write func(x *session, i int) error) {
		t.Helper()
		s, err := mvcc.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		x := mustSession(t, s)
		for i := range 200 {
			if err := write(x, i); err != nil {
				t.Fatal(err)
			}
		}
		x.Close()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	run(func(x *session, i int) error { _, err := put(x, key(i), "old", mvcc.DurabilitySync); return err })
	tree := damageUserLeaves(t, o.Storage.FS, o.Storage.PageSize)
	run(func(x *session, i int) error { _, err := put(x, key(i), "new", mvcc.DurabilitySync); return err })
	beside := damageUserLeaves(t, o.Storage.FS, o.Storage.PageSize) // the repair tree's, but for the one with the records
	for _, at := range slices.Concat(tree, beside) {
		flip(t, o.Storage.FS, at)
	}
	file := readFile(t, o.Storage.FS, dataFile)
	beside = slices.DeleteFunc(beside, func(at int64) bool { // keep those of the upper half, in the repair tree and in its mirror
		v := page.Leaf(file[at/512*512:][:512]).Layout()
		return string(keys.User(slices.Concat(v.Prefix(), v.Suffix(0)))) < key(100)
	})
	for _, at := range beside {
		flip(t, o.Storage.FS, at)
	}
	got, report := mustSalvage(t, o.Storage.FS)
	for k, v := range got {
		if v != "new" {
			t.Fatalf("%s = %q", k, v)
		}
	}
	if len(beside) == 0 || len(got) == 0 || len(got) == 200 || report.LostTotal < uint64(len(beside)) {
		t.Errorf("%d damaged pages outside the tree, %d keys, %d lost", len(beside), len(got), report.LostTotal)
	}
}

// TestNothingIsWrongDespiteDamage writes at random while pages of the tree are damaged one by one,
// restarts and crashes. A read is right or DATA_LOSS. Keys written after the last damage can be
// read. No write is refused. Salvage restores no wrong version, and every key that can be read.
func TestNothingIsWrongDespiteDamage(t *testing.T) {
	testBesideDamage(t, false)
}

// TestNothingIsWrongDespiteDamageWithRangesAndBulkLoads does so with range deletes and bulk loads,
// which read and write many pages at once.
func TestNothingIsWrongDespiteDamageWithRangesAndBulkLoads(t *testing.T) {
	testBesideDamage(t, true)
}

func testBesideDamage(t *testing.T, mixed bool) {
	t.Helper()
	lost, refused, loads := 0, 0, 0
	base := testseed.Base(t)
	for run := range uint64(*sideSeeds / exhaustiveStep) {
		seed := base + run
		rng := rand.New(rand.NewPCG(seed, 5))
		d := &besideDamage{t: t, rng: rng, o: modelOptions(vfs.NewMem()), want: map[string]string{}, since: map[string]bool{}, mixed: mixed}
		d.open()
		for round := range 12 {
			d.write(20 + rng.IntN(100))
			d.check()
			switch rng.IntN(4) {
			case 0:
				d.crash()
			case 1:
				d.restart()
			default:
				if err := d.s.Checkpoint(context.Background()); err != nil {
					t.Fatalf("seed %d, round %d: checkpoint: %v", seed, round, err)
				}
			}
			d.check()
			if round >= 2 && rng.IntN(2) == 0 {
				d.damage()
			}
			if t.Failed() {
				t.Fatalf("seed %d, round %d", seed, round)
			}
		}
		lost += d.s.Stats().Storage.Damage.SkippedPages
		refused, loads = refused+d.refused, loads+d.loads
		d.salvage()
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	if lost == 0 || refused == 0 || mixed && loads == 0 {
		t.Fatalf("%d skipped pages, %d refused reads, %d bulk loads: the test tests nothing", lost, refused, loads)
	}
	t.Logf("%d pages lost, %d reads refused", lost, refused)
}

type besideDamage struct {
	t       *testing.T
	rng     *rand.Rand
	o       mvcc.Options
	s       *mvcc.Store
	x       *session
	want    map[string]string // "" was deleted
	since   map[string]bool   // written since the last damage
	refused int
	mixed   bool // range deletes, bulk loads and transactions, too
	loads   int

	view *session // reads what was, as long as nothing is restarted
	was  map[string]string
}

func (d *besideDamage) open() {
	s, err := mvcc.Open(d.o)
	if err != nil {
		d.t.Fatal(err)
	}
	d.s, d.x = s, mustSession(d.t, s)
	d.view, d.was = mustSession(d.t, s), maps.Clone(d.want)
	if _, err := d.view.OpenSnapshot(0); err != nil {
		d.t.Fatal(err)
	}
}

// endSessions closes the sessions, so that Close can complete.
func (d *besideDamage) endSessions() {
	d.x.Close()
	d.view.Close()
}

func (d *besideDamage) write(n int) {
	for range n {
		if d.mixed && d.rng.IntN(25) == 0 {
			d.writeMany()
			continue
		}
		k, v := fmt.Sprintf("key-%03d", d.rng.IntN(150)), ""
		w := mvcc.Write{Durability: mvcc.DurabilitySync}
		switch d.rng.IntN(8) {
		case 0, 1:
			w.Delete([]byte(k))
		case 2:
			v = strings.Repeat("L", 200+d.rng.IntN(2500))
		default:
			v = fmt.Sprint(d.rng.Uint64()) + strings.Repeat("v", d.rng.IntN(60))
		}
		if v != "" {
			w.Set([]byte(k), []byte(v))
		}
		if _, err := commitAndWait(d.x, &w); err != nil {
			d.t.Fatalf("a write was refused: %v", err)
		}
		d.want[k], d.since[k] = v, true
	}
}

// writeMany deletes a range, in a transaction or not, or makes a bulk load. An operation that has
// to read a damaged page may be refused, and then changes nothing.
func (d *besideDamage) writeMany() {
	d.t.Helper()
	lower := d.rng.IntN(150)
	upper := lower + 1 + d.rng.IntN(20)
	keyOf := func(i int) string { return fmt.Sprintf("key-%03d", i) }
	var err error
	done := func(i int) { d.want[keyOf(i)], d.since[keyOf(i)] = "", true }
	switch d.rng.IntN(3) {
	case 0:
		var out mvcc.RangeDeleted
		out, err = d.x.DeleteRange(context.Background(), mvcc.RangeDelete{Lower: []byte(keyOf(lower)), Upper: []byte(keyOf(upper)), Durability: mvcc.DurabilitySync})
		if err == nil {
			err = d.s.Wait(context.Background(), out.Epoch, mvcc.DurabilitySync)
		}
	case 1:
		err = d.deleteInTxn(keyOf(lower), keyOf(upper))
	default:
		entries := map[string]string{}
		for i := lower; i < min(upper, 150); i++ {
			entries[keyOf(i)] = fmt.Sprint("loaded ", d.rng.Uint64()) + strings.Repeat("l", d.rng.IntN(1200))
		}
		if len(entries) == 0 {
			return
		}
		if _, err = load(d.s, entries); err == nil {
			d.loads++
		}
		done = func(i int) {
			if v, ok := entries[keyOf(i)]; ok {
				d.want[keyOf(i)], d.since[keyOf(i)] = v, true
			}
		}
	}
	if err != nil && !asDamage(err) {
		d.t.Fatalf("a write of many keys: %v", err)
	}
	for i := lower; err == nil && i < min(upper, 150); i++ {
		done(i)
	}
}

func (d *besideDamage) deleteInTxn(lower, upper string) error {
	tx, err := d.x.Begin(mvcc.TxnOptions{Durability: mvcc.DurabilitySync})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.DeleteRange(context.Background(), []byte(lower), []byte(upper)); err != nil {
		return err
	}
	e, err := tx.Commit(context.Background())
	if err != nil {
		return err
	}
	return d.s.Wait(context.Background(), e, mvcc.DurabilitySync)
}

// readable has all keys that can be read without DATA_LOSS.
func (d *besideDamage) check() (readable map[string]string) {
	d.t.Helper()
	readable = map[string]string{}
	for k, want := range d.want {
		v, err := d.x.Get(nil, []byte(k), 0)
		if err == nil && v.Found == (want != "") && string(v.Data) == want {
			if want != "" {
				readable[k] = want
			}
			continue
		}
		// The deletion of a key next to a damaged page may have put the key into the range of that
		// page. Then a read cannot find out that the key is deleted.
		if d.refused++; !asDamage(err) || d.since[k] && want != "" {
			d.t.Fatalf("%q: %v %.20q, %v; want %.20q, written since the damage: %v", k, v.Found, v.Data, err, want, d.since[k])
		}
	}
	d.checkView()
	d.checkBatch(readable)
	d.checkScan()
	return readable
}

// checkView reads at an older snapshot.
func (d *besideDamage) checkView() {
	d.t.Helper()
	for k := range d.want {
		err := d.view.ReadAll(context.Background(), [][]byte{[]byte(k)}, func(_ int, v mvcc.Value) error {
			if want := d.was[k]; v.Found != (want != "") || string(v.Data) != want {
				return fmt.Errorf("%v %.20q, want %.20q", v.Found, v.Data, want)
			}
			return nil
		})
		if err != nil && !asDamage(err) {
			d.t.Fatalf("%q in an older snapshot: %v", k, err)
		}
	}
}

// checkBatch reads what can be read in one batch.
func (d *besideDamage) checkBatch(readable map[string]string) {
	d.t.Helper()
	var list [][]byte
	for k := range readable {
		list = append(list, []byte(k))
	}
	if _, err := d.x.OpenSnapshot(0); err != nil {
		d.t.Fatal(err)
	}
	defer d.x.CloseSnapshot()
	err := d.x.ReadAll(context.Background(), list, func(i int, v mvcc.Value) error {
		if want := readable[string(list[i])]; !v.Found || string(v.Data) != want {
			return fmt.Errorf("%q in a batch: %v %.20q, want %.20q", list[i], v.Found, v.Data, want)
		}
		return nil
	})
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *besideDamage) checkScan() {
	d.t.Helper()
	if _, err := d.x.OpenSnapshot(0); err != nil {
		d.t.Fatal(err)
	}
	defer d.x.CloseSnapshot()
	var order []string
	for k, v := range d.want {
		if v != "" {
			order = append(order, k)
		}
	}
	slices.Sort(order)
	reverse := d.rng.IntN(2) == 0
	if reverse {
		slices.Reverse(order)
	}
	c, err := d.x.Scan(mvcc.ScanOptions{Reverse: reverse})
	if err != nil {
		d.t.Fatal(err)
	}
	defer c.Close()
	n := 0
	for ; c.Next(); n++ {
		if n == len(order) || string(c.Key()) != order[n] || string(c.Value()) != d.want[order[n]] {
			d.t.Fatalf("scan, reverse %v: entry %d is %q", reverse, n, c.Key())
		}
	}
	if err := c.Err(); err != nil && !asDamage(err) || err == nil && n != len(order) {
		d.t.Fatalf("scan, reverse %v: ended after %d of %d: %v", reverse, n, len(order), err)
	}
}

// damage damages a page that a walk of the tree reaches, outside the repair tree, or a page of
// large values. It reopens the store, because the page cache would hide the damage.
func (d *besideDamage) damage() {
	d.close()
	ids := treePages(d.t, d.o.Storage.FS)
	if d.rng.IntN(3) == 0 {
		ids = valuePages(d.t, d.o.Storage.FS, d.o.Storage.PageSize)
	}
	if len(ids) > 1 {
		size := d.o.Storage.PageSize
		flip(d.t, d.o.Storage.FS, int64(int(ids[d.rng.IntN(len(ids))])*size+d.rng.IntN(size)))
		clear(d.since)
	}
	d.open()
}

func (d *besideDamage) close() {
	d.endSessions()
	if err := d.s.Close(); err != nil {
		d.t.Fatalf("close: %v", err)
	}
}

func (d *besideDamage) restart() {
	d.close()
	d.open()
}

func (d *besideDamage) crash() {
	left := d.o.Storage.FS.(*vfs.Mem).Crash(d.rng.Uint64(), vfs.SurviveSome)
	d.endSessions()
	_ = d.s.Close() // on a disk that is gone
	d.o.Storage.FS = left
	d.open()
}

func (d *besideDamage) salvage() {
	readable := d.check()
	d.close()
	got, _ := mustSalvage(d.t, d.o.Storage.FS)
	for k, v := range got {
		if d.want[k] != v {
			d.t.Fatalf("salvaged %q = %.20q, want %.20q", k, v, d.want[k])
		}
	}
	for k := range readable {
		if _, ok := got[k]; !ok {
			d.t.Fatalf("%q can be read, and was not salvaged", k)
		}
	}
}

// TestSkippingDamageSurvivesACrashAtEveryOperation cuts the power at each operation of
// checkpoints that skip damaged pages for the first time, and of those that follow.
func TestSkippingDamageSurvivesACrashAtEveryOperation(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		mustPut(t, s, fmt.Sprintf("k%03d", i), strings.Repeat("v", i%60))
	}
	mustClose(t, s)
	damageUserLeaves(t, o.Storage.FS, o.Storage.PageSize)
	files := mustRead(t, o.Storage.FS)

	// script writes and checkpoints twice, and says what was acknowledged.
	script := func(fs *vfs.Mem) (acked map[string]string, ops int64) {
		acked = map[string]string{}
		before := fs.Mutations()
		o.Storage.FS, o.SyncInterval = fs, time.Hour
		s, err := mvcc.Open(o)
		if err != nil {
			return acked, 0
		}
		x := mustSession(t, s)
		for round := range 2 {
			for i := round; i < 60; i += 5 {
				k, v := fmt.Sprintf("k%03d", i), fmt.Sprintf("%d-%s", round, strings.Repeat("w", i))
				if _, err := put(x, k, v, mvcc.DurabilitySync); err == nil {
					acked[k] = v
				}
			}
			_ = s.Checkpoint(context.Background())
		}
		x.Close()
		_ = s.Close()
		return acked, fs.Mutations() - before
	}
	_, ops := script(files.files(t))
	for k := int64(1); k <= ops; k += exhaustiveStep {
		fs := files.files(t)
		fs.CrashAt(fs.Mutations() + k)
		acked, _ := script(fs)
		o.Storage.FS = fs.Crash(uint64(k), []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}[k%3])
		s, err := mvcc.Open(o)
		if err != nil {
			t.Fatalf("crash at operation %d of %d: %v", k, ops, err)
		}
		for i := range 60 {
			key := fmt.Sprintf("k%03d", i)
			x := mustSession(t, s)
			v, err := x.Get(nil, []byte(key), 0)
			if want, ok := acked[key]; ok && (err != nil || string(v.Data) != want) {
				t.Fatalf("crash at operation %d of %d: %s = %q, %v; acknowledged was %q", k, ops, key, v.Data, err, want)
			}
			if err != nil && !asDamage(err) {
				t.Fatalf("crash at operation %d of %d: %s: %v", k, ops, key, err)
			}
			x.Close()
		}
		if err := s.Close(); err != nil {
			t.Fatalf("crash at operation %d of %d: close: %v", k, ops, err)
		}
	}
}

// mustOpenDamaged is a store of 100 keys whose leaves were all damaged while it was closed. It is
// closed when the test ends.
func mustOpenDamaged(t *testing.T) *mvcc.Store {
	t.Helper()
	o := modelOptions(vfs.NewMem())
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		mustPut(t, s, fmt.Sprintf("k%03d", i), "v")
	}
	mustClose(t, s)
	damageUserLeaves(t, o.Storage.FS, o.Storage.PageSize)
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// TestConflictsAreFoundDespiteDamage: the version that a transaction conflicts with was merged into
// the repair tree meanwhile.
func TestConflictsAreFoundDespiteDamage(t *testing.T) {
	s := mustOpenDamaged(t)
	mustPut(t, s, "k050", "since")
	x := mustSession(t, s)
	defer x.Close()
	for name, use := range map[string]func(tx *mvcc.Txn) error{
		"read": func(tx *mvcc.Txn) error {
			_, err := tx.Get(nil, []byte("k050"))
			return errors.Join(err, tx.Set([]byte("k070"), nil))
		},
		"write": func(tx *mvcc.Txn) error { return tx.Set([]byte("k050"), []byte("mine")) },
	} {
		tx, err := x.Begin(mvcc.TxnOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := use(tx); err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, "k050", "theirs")
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
		var conflict *mvcc.ConflictError
		if _, err := tx.Commit(context.Background()); !errors.As(err, &conflict) || string(conflict.Key) != "k050" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := get(t, s, "k050", 0); got != "theirs" {
		t.Errorf("k050 is %q", got)
	}
}

// TestBulkLoadSkipsDamageAtTheSecondAttempt: the first bulk load that meets a damaged page is
// refused, and has changed nothing.
func TestBulkLoadSkipsDamageAtTheSecondAttempt(t *testing.T) {
	s := mustOpenDamaged(t)
	load := func() error {
		l, err := s.BeginBulkLoad()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		for i := 0; i < 100; i += 2 {
			if err := l.Add(fmt.Appendf(nil, "k%03d", i), fmt.Appendf(nil, "loaded-%s", strings.Repeat("l", 20*i))); err != nil {
				t.Fatal(err)
			}
		}
		_, err = l.Commit(context.Background())
		return err
	}
	if err := load(); !asDamage(err) {
		t.Fatalf("a bulk load on damaged pages: %v", err)
	}
	x := mustSession(t, s)
	defer x.Close()
	if v, err := x.Get(nil, []byte("k000"), 0); !asDamage(err) {
		t.Fatalf("after the refused bulk load: %+v, %v", v, err)
	}
	if err := load(); err != nil {
		t.Fatalf("once more: %v", err)
	}
	for i := range 100 {
		v, err := x.Get(nil, fmt.Appendf(nil, "k%03d", i), 0)
		if i%2 == 1 && !asDamage(err) || i%2 == 0 && (err != nil || string(v.Data) != "loaded-"+strings.Repeat("l", 20*i)) {
			t.Fatalf("k%03d: %q, %v", i, v.Data, err)
		}
	}
}

// TestDamagedPageAtTheFileEndCausesNoEndlessCheckpoints: a damaged page cannot be relocated, so the
// file cannot shrink. Checkpoints that look for pages to relocate end nevertheless.
func TestDamagedPageAtTheFileEndCausesNoEndlessCheckpoints(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	o.CheckpointInterval = time.Hour
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3000 {
		mustPut(t, s, fmt.Sprintf("k%04d", i), strings.Repeat("v", 50))
	}
	mustClose(t, s)
	file := readFile(t, o.Storage.FS, dataFile)
	last := slices.Max(slices.DeleteFunc(treePages(t, o.Storage.FS), func(id page.ID) bool {
		return !page.IsTree(file[int(id)*o.Storage.PageSize:], 0)
	}))
	flip(t, o.Storage.FS, int64(last)*int64(o.Storage.PageSize)+100)
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	x := mustSession(t, s)
	defer x.Close()
	for i := range 3000 {
		w := mvcc.Write{Durability: mvcc.DurabilityAsync}
		w.Delete(fmt.Appendf(nil, "k%04d", i))
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
	}
	before := s.Stats().Storage.Pages.FileBytes
	for range 100 {
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	st := s.Stats().Storage
	if st.Pages.FileBytes <= int64(last)*int64(o.Storage.PageSize) || st.Damage.SkippedPages != 1 {
		t.Errorf("%d bytes of %d, %d skipped pages: the test tests nothing", st.Pages.FileBytes, before, st.Damage.SkippedPages)
	}
	if pages := st.Pages; pages.FileBytes/int64(st.PageSize) <= 2*int64(pages.Live)+128 {
		t.Errorf("%+v: the test tests nothing", pages)
	}
	time.Sleep(1200 * time.Millisecond) // each second the store looks for work to do
	if now := s.Stats().Storage; now.Checkpoints.Finished != st.Checkpoints.Finished || now.Pages.PagesRead != st.Pages.PagesRead {
		t.Errorf("%+v, then %+v: there is work to do for checkpoints", st.Checkpoints, now.Checkpoints)
	}
}

// TestWritersGetTheDamageThatBlocksCheckpoints: checkpoints stop when the repair tree is damaged,
// too. Then writers get that error at once, instead of a lack of memory later, and keys in memory
// can still be read.
func TestWritersGetTheDamageThatBlocksCheckpoints(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemoryBytes, o.Storage.StallMax = 4<<20, time.Minute
	write := func(x *session, i int) error {
		_, err := put(x, fmt.Sprintf("k%03d", i%200), strings.Repeat("w", 1000), mvcc.DurabilityAsync)
		return err
	}
	for range 2 { // the tree, and then the repair tree
		s, err := mvcc.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		x := mustSession(t, s)
		for i := range 200 {
			if err := write(x, i); err != nil {
				t.Fatal(err)
			}
		}
		x.Close()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		damageUserLeaves(t, o.Storage.FS, 8192)
	}
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }() // its checkpoint meets the damage, too
	x := mustSession(t, s)
	defer x.Close()
	for i := 0; ; i++ {
		err := write(x, i)
		if asDamage(err) {
			break
		}
		if err != nil || i > 20_000 {
			t.Fatalf("write %d: %v", i, err)
		}
	}
	if got := get(t, s, "k000", 0); got != strings.Repeat("w", 1000) {
		t.Errorf("k000 is %.20q", got)
	}
}

// TestDeletionHidesVersionsOnASkippedPage: the versions of one key fill several leaves, and one of
// the leaves cannot be read when no reader needs the versions any more. The tombstone of the key
// must remain as long as that page does. Otherwise versions in it would be visible if it became
// readable.
func TestDeletionHidesVersionsOnASkippedPage(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "a", "first")
	mustPut(t, s, "z", "last")
	var snapshots []*session
	for i := range 30 {
		mustPut(t, s, "k", fmt.Sprintf("%d-%s", i, strings.Repeat("v", 90)))
		x := mustSession(t, s)
		if _, err := x.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		snapshots = append(snapshots, x)
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	var inside []int64 // places on leaves that hold nothing but older versions of k
	file := readFile(t, o.Storage.FS, dataFile)
	for _, id := range treePages(t, o.Storage.FS) {
		p := file[int(id)*o.Storage.PageSize : (int(id)+1)*o.Storage.PageSize]
		if !page.IsTree(p, 0) {
			continue
		}
		v := page.Leaf(p).Layout()
		if key := string(v.Prefix()) + string(v.Suffix(0)); key == string(keys.Append(nil, keys.SpaceUser, []byte("k"))) {
			inside = append(inside, int64(int(id)*o.Storage.PageSize+100))
		}
	}
	if len(inside) < 3 {
		t.Fatalf("%d leaves have only older versions", len(inside))
	}
	bad := inside[len(inside)/2]
	flip(t, o.Storage.FS, bad)
	for _, x := range snapshots {
		x.Close()
	}
	x := mustSession(t, s)
	w := mvcc.Write{Durability: mvcc.DurabilitySync}
	w.Delete([]byte("k"))
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		mustPut(t, s, "a", "again")
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.Stats().Storage.Damage.SkippedPages; n != 1 {
		t.Fatalf("%d skipped pages", n)
	}
	if v, err := x.Get(nil, []byte("k"), 0); v.Found || err != nil {
		t.Errorf("%v %.20q %v", v.Found, v.Data, err)
	}
	x.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	flip(t, o.Storage.FS, bad)
	got, _ := mustSalvage(t, o.Storage.FS)
	if v, found := got["k"]; found {
		t.Errorf("salvage brings out %.20q, which was deleted", v)
	}
	if s, err = mvcc.Open(o); err != nil {
		t.Fatal(err)
	}
	x = mustSession(t, s)
	if v, err := x.Get(nil, []byte("k"), 0); v.Found || err != nil {
		t.Errorf("%v %.20q %v", v.Found, v.Data, err)
	}
	x.Close()
	mustClose(t, s)
}

// TestSalvageRestoresAValueThatOneOfTwoTreesHas: the repair tree and its mirror each have a copy of
// a large value. If one copy is damaged, salvage restores the other, also when the tree's root is
// lost and salvage reads every leaf of the file. A leaf is lost with the root, so that no checkpoint
// can rebuild the root and end the repair tree.
func TestSalvageRestoresAValueThatOneOfTwoTreesHas(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	fs, pageSize := o.Storage.FS, o.Storage.PageSize
	writeWithLarge(t, o, "small, too")
	if before := valuePages(t, fs, pageSize); len(before) != 0 {
		t.Fatalf("%d blob pages before the first blob", len(before))
	}
	pages := treePages(t, fs)
	clearPages(t, fs, pageSize, pages[0], pages[len(pages)/2]) // the root and a leaf
	value := strings.Repeat("L", 3*pageSize)
	if d := writeWithLarge(t, o, value); d.RebuiltNodes != 0 || d.SkippedPages != 1 {
		t.Fatalf("%+v: the test tests nothing", d)
	}
	alone := 0
	for _, id := range valuePages(t, fs, pageSize) {
		at := int64(int(id)*pageSize + pageSize - 100)
		flip(t, fs, at)
		got, report := mustSalvage(t, fs)
		if lostValues(report) < 2 { // else the copies share the page
			alone++
			if got["large"] != value {
				t.Errorf("with page %d of the values damaged, which one copy needs, %d bytes come out", id, len(got["large"]))
			}
		}
		flip(t, fs, at)
	}
	if alone < 2 {
		t.Errorf("%d pages that one copy needs alone", alone)
	}
}

// TestSalvageRestoresAValueOfARebuiltTree: when the root was rebuilt, the value that the repair tree had is the tree's. It has
// one copy: salvage restores it from intact pages, and reports it as lost if a page of it is damaged.
func TestSalvageRestoresAValueOfARebuiltTree(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	fs, pageSize := o.Storage.FS, o.Storage.PageSize
	writeWithLarge(t, o, "small, too")
	clearPages(t, fs, pageSize, treePages(t, fs)[0])
	value := strings.Repeat("L", 3*pageSize)
	rebuilt := make(chan storage.Rebuild, 100)
	o.Storage.OnRebuild = func(r storage.Rebuild) { rebuilt <- r }
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "large", value)
	for len(rebuilt) == 0 {
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if r := <-rebuilt; r.Children == 0 {
		t.Fatalf("not rebuilt: %s", r.Reason)
	}
	mustClose(t, s)
	if got, report := mustSalvage(t, fs); got["large"] != value || len(got) != 201 || report.LostTotal > 0 {
		t.Errorf("%d keys, %d bytes of the large value, %+v", len(got), len(got["large"]), report)
	}
	needed := 0
	for _, id := range valuePages(t, fs, pageSize) {
		at := int64(int(id)*pageSize + pageSize - 100)
		flip(t, fs, at)
		got, report := mustSalvage(t, fs)
		if n := lostValues(report); len(got) != 201-n || n == 0 && got["large"] != value {
			t.Errorf("with page %d of the values damaged, %d keys come out, %d values are reported as lost", id, len(got), n)
		} else {
			needed += n
		}
		flip(t, fs, at)
	}
	if needed == 0 {
		t.Error("no page of the values is needed")
	}
}

// TestRebuildingKeepsAValueThatOneOfTwoTreesHas: the value of the repair tree is damaged and its mirror has it. A merge that
// rebuilds the root would end both trees, so it is given up, and salvage still finds the value.
func TestRebuildingKeepsAValueThatOneOfTwoTreesHas(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	fs, pageSize := o.Storage.FS, o.Storage.PageSize
	writeWithLarge(t, o, "small, too")
	pages := treePages(t, fs)
	leaf, intact := pages[len(pages)/2], readFile(t, fs, dataFile)
	clearPages(t, fs, pageSize, pages[0], leaf) // so that the root is not rebuilt
	value := strings.Repeat("L", 3*pageSize)
	writeWithLarge(t, o, value)
	files := mustRead(t, fs)
	copy(files[dataFile][int(leaf)*pageSize:], intact[int(leaf)*pageSize:int(leaf+1)*pageSize]) // so that it is
	rebuilt, refused := 0, 0
	for _, id := range append(valuePages(t, fs, pageSize), 0) {
		o := modelOptions(files.files(t))
		at := int64(int(id)*pageSize + pageSize - 100)
		if id != 0 {
			flip(t, o.Storage.FS, at)
		}
		if _, report := mustSalvage(t, o.Storage.FS); lostValues(report) > 1 {
			continue // the copies share the page
		}
		if awaitRebuild(t, o).Children > 0 {
			rebuilt++
		} else {
			refused++
		}
		if got, _ := mustSalvage(t, o.Storage.FS); got["large"] != value {
			t.Errorf("with page %d of the values damaged, %d bytes come out", id, len(got["large"]))
		}
	}
	if rebuilt == 0 || refused == 0 {
		t.Errorf("%d roots rebuilt, %d refused: the test tests too little", rebuilt, refused)
	}
}

// awaitRebuild opens a store, checkpoints until a damaged node is rebuilt or refused, and closes the store.
func awaitRebuild(t testing.TB, o mvcc.Options) (r storage.Rebuild) {
	t.Helper()
	reports := make(chan storage.Rebuild, 100)
	o.Storage.OnRebuild = func(r storage.Rebuild) { reports <- r }
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for len(reports) == 0 {
		mustPut(t, s, "k000", "small")
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return <-reports
}

// writeWithLarge opens a store, writes 200 small values and this value, and closes it. It returns the damage that it had.
func writeWithLarge(t testing.TB, o mvcc.Options, value string) storage.DamageStats {
	t.Helper()
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	for i := range 200 {
		if _, err := put(x, fmt.Sprintf("k%03d", i), "small", mvcc.DurabilitySync); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := put(x, "large", value, mvcc.DurabilitySync); err != nil {
		t.Fatal(err)
	}
	x.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return s.Stats().Storage.Damage
}

// clearPages overwrites pages of the data file with zeros.
func clearPages(t testing.TB, fs vfs.FS, pageSize int, ids ...page.ID) {
	t.Helper()
	f, err := fs.Open(dataFile, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if _, err := f.WriteAt(make([]byte, pageSize), int64(id)*int64(pageSize)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// lostValues is how many values salvage has lost.
func lostValues(report *inspect.SalvageReport) (n int) {
	for i := range report.Lost {
		if report.Lost[i].Kind == inspect.DamageValue {
			n++
		}
	}
	return n
}
