package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/quarantine"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// disordered is an input that has one version of a key twice, the second time as a newer one: what an order error looks like to the tree.
type disordered struct {
	btree.Input
	key   string
	again btree.Entry
	twice bool
}

func (d *disordered) SeekGE(key []byte) {
	d.twice = false
	d.Input.SeekGE(key)
}

func (d *disordered) Next(e *btree.Entry) bool {
	if d.twice {
		*e, d.twice = d.again, false
		return true
	}
	if !d.Input.Next(e) {
		return false
	}
	if string(e.Key) == d.key {
		d.again, d.twice = *e, true
		d.again.Trailer = keys.MakeTrailer(e.Trailer.Epoch()+1, e.Trailer.Kind())
	}
	return true
}

const orderKey = "key-00050"

func disturb(in btree.Input) btree.Input {
	return &disordered{Input: in, key: string(keys.Append(nil, keys.SpaceUser, []byte(orderKey)))}
}

// longKeys are keys that no page of 512 bytes holds: before, between and after the others.
func longKeys() []string {
	var all []string
	for _, first := range []string{"a", "key-00007", "z"} {
		all = append(all, first+strings.Repeat("x", 200))
	}
	return all
}

// quarantineBench is a bench on which the tree refuses what refused() names, and what it should hold.
type quarantineBench struct {
	*bench
	options Options
	want    map[string]string
}

func newQuarantineBench(t *testing.T, fs *vfs.Mem) *quarantineBench {
	t.Helper()
	q := &quarantineBench{
		bench:   &bench{t: t, visible: new(atomic.Uint64), fs: fs},
		want:    map[string]string{},
		options: Options{Dir: "db", FS: fs, PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10},
	}
	q.options.disturb = disturb
	return q
}

func refused() []string { return append(longKeys(), orderKey) }

func (q *quarantineBench) open() error {
	registry := pin.NewRegistry(q.visible)
	q.slot = registry.Slot()
	q.writer = Writer{}
	var recovery Recovery
	var err error
	q.engine, recovery, err = Open(context.Background(), q.options, registry)
	if err == nil {
		q.visible.Store(uint64(max(recovery.Epoch, recovery.Next-1)))
	}
	return err
}

func (q *quarantineBench) mustOpen() {
	q.t.Helper()
	if err := q.open(); err != nil {
		q.t.Fatal(err)
	}
}

func (q *quarantineBench) mustClose() {
	q.t.Helper()
	if err := q.engine.Close(); err != nil {
		q.t.Fatal(err)
	}
}

// set commits one key; "" deletes it.
func (q *quarantineBench) set(key, value string) {
	q.t.Helper()
	var w batch.Builder
	if value == "" {
		w.Delete(keys.SpaceUser, []byte(key))
		delete(q.want, key)
	} else {
		w.Set(keys.SpaceUser, []byte(key), []byte(value))
		q.want[key] = value
	}
	q.commit(&w)
}

func (q *quarantineBench) fill() {
	q.t.Helper()
	for i := range 100 {
		q.set(fmt.Sprintf("key-%05d", i), "plain")
	}
	for _, key := range longKeys() {
		q.set(key, "one")
	}
}

func (q *quarantineBench) checkpointAt(live ...keys.Epoch) error {
	at := keys.Epoch(q.visible.Load())
	if err := q.engine.Rotate(context.Background()); err != nil {
		return err
	}
	return q.engine.Checkpoint(context.Background(), GCWatermarks{Visible: at, Snapshots: append(live, at)})
}

// check reads everything in each way that there is, at a snapshot.
func (q *quarantineBench) check(at keys.Epoch, want map[string]string) {
	q.t.Helper()
	r := q.engine.NewReader()
	q.slot.Enter()
	defer q.slot.Leave()
	all := slices.Sorted(maps.Keys(want))
	q.checkScan(r, at, want, all)
	q.checkGets(r, at, want)
}

// checkGets reads everything key by key, and in one batch.
func (q *quarantineBench) checkGets(r *Reader, at keys.Epoch, want map[string]string) {
	q.t.Helper()
	all := slices.Sorted(maps.Keys(want))
	var list [][]byte
	for _, key := range append(refused(), append(all, "absent", "key-00041", "absent"+strings.Repeat("y", 300))...) {
		list = append(list, keys.Append(nil, keys.SpaceUser, []byte(key)))
	}
	one := func(i int, v Version, ok bool, how string) {
		q.t.Helper()
		value, exists := want[string(keys.User(list[i]))]
		got := q.value(r, v, ok)
		if found := ok && v.Kind == keys.KindSet; found != exists || found && got != value {
			q.t.Fatalf("%s of %.20q at %d: %v %.20q, want %.20q", how, list[i], at, ok, got, value)
		}
	}
	for i, key := range list {
		v, ok, err := r.Get(key, at)
		if err != nil {
			q.t.Fatal(err)
		}
		one(i, v, ok, "get")
	}
	err := r.GetAll(new(Finder), list, at, Visits{Each: func(i int, v Version, ok bool) error { one(i, v, ok, "batch get"); return nil }})
	if err != nil {
		q.t.Fatal(err)
	}
}

// value is the value of a version, inline or not; empty if there is none.
func (q *quarantineBench) value(r *Reader, v Version, ok bool) string {
	q.t.Helper()
	if !ok || v.Kind != keys.KindSet {
		return ""
	}
	value, err := r.AppendValue(nil, v)
	if err != nil {
		q.t.Fatal(err)
	}
	return string(value)
}

func (q *quarantineBench) checkScan(r *Reader, at keys.Epoch, want map[string]string, all []string) {
	q.t.Helper()
	for _, reverse := range []bool{false, true} {
		var got []string
		var c Cursor
		lower, upper := []byte{byte(keys.SpaceUser)}, []byte{byte(keys.SpaceUser) + 1}
		step := func() {
			for ; c.Valid(); map[bool]func(){false: c.Next, true: c.Prev}[reverse]() {
				if key := string(keys.User(c.Key())); c.Version().Kind == keys.KindSet {
					got = append(got, key)
					if got := q.value(r, *c.Version(), true); got != want[key] {
						q.t.Fatalf("scan at %d: %.20q is %.20q, want %.20q", at, key, got, want[key])
					}
				}
			}
		}
		from := lower
		if reverse {
			from = upper
		}
		for again := true; again; again = c.Paused() {
			if c.Paused() {
				from = bytes.Clone(c.Resume())
			}
			r.OpenCursor(&c, at, lower, upper, 0)
			if reverse {
				c.SeekLT(from)
			} else {
				c.SeekGE(from)
			}
			step()
		}
		if c.Err() != nil {
			q.t.Fatal(c.Err())
		}
		if reverse {
			slices.Reverse(got)
		}
		if !slices.Equal(got, all) {
			q.t.Fatalf("scan at %d, reverse %v: %d keys, want %d", at, reverse, len(got), len(all))
		}
	}
}

// checkOffline closes the store, verifies it, and brings out everything.
func (q *quarantineBench) checkOffline(notes bool) {
	q.t.Helper()
	if kinds := q.found(); len(kinds) > 0 {
		q.t.Fatalf("verify: %v", kinds)
	}
	report, err := Inspect.Files(context.Background(), q.fs, "db")
	if err != nil || notes != strings.Contains(strings.Join(report.Notes, "\n"), "quarantine") {
		q.t.Fatalf("verify: %v, notes %q", err, report.Notes)
	}
	got := map[string]string{}
	_, err = Inspect.Salvage(context.Background(), q.fs, "db", func(key, value []byte, _ keys.Epoch) error {
		got[string(key)] = string(value)
		return nil
	})
	if err != nil || !maps.Equal(got, q.want) {
		q.t.Fatalf("salvage: %d keys, want %d: %v", len(got), len(q.want), err)
	}
}

// TestRefusedEntriesDoNotBlockCheckpoints: keys that are too long for a page, and one whose versions the tree finds out of order, are read in every way, at
// every snapshot, overwritten and deleted, before and after restarts; and checkpoints go on.
func TestRefusedEntriesDoNotBlockCheckpoints(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	checkpoint := func(live ...keys.Epoch) {
		t.Helper()
		if err := q.checkpointAt(live...); err != nil {
			t.Fatal(err)
		}
	}
	now := func() keys.Epoch { return keys.Epoch(q.visible.Load()) }
	q.engine.options.disturb = nil
	q.set(orderKey, "in the tree")
	checkpoint()
	q.fill()
	q.mustClose() // without a checkpoint: the next start replays it
	q.mustOpen()
	first, atFirst := maps.Clone(q.want), now()
	q.check(atFirst, first)
	checkpoint()
	q.check(now(), q.want)
	if st := q.engine.Stats(); st.Quarantine.Versions != 4 || st.Quarantine.Reason == "" || len(st.Generations) != 1 {
		t.Fatalf("%d versions in quarantine, %d generations", st.Quarantine.Versions, len(st.Generations))
	}
	if _, err := q.engine.NewBulkLoad(); !errors.Is(err, ErrBulkLoadQuarantine) {
		t.Fatalf("a bulk load beside a quarantine: %v", err)
	}

	q.checkOffline(true)
	q.mustOpen()
	q.check(now(), q.want)
	atFirst = now()
	for _, key := range refused() {
		q.set(key, "two")
	}
	second, atSecond := maps.Clone(q.want), now()
	checkpoint(atFirst)
	q.set(longKeys()[1], "")
	q.set(orderKey, "")
	checkpoint(atFirst, atSecond)
	for at, want := range map[keys.Epoch]map[string]string{atFirst: first, atSecond: second, now(): q.want} {
		q.check(at, want)
	}
	r := q.engine.NewReader()
	q.slot.Enter()
	key := keys.Append(nil, keys.SpaceUser, []byte(longKeys()[1]))
	if epoch, err := r.NewestSince(key, atSecond); err != nil || epoch <= atSecond {
		t.Fatalf("newest since %d: %d, %v", atSecond, epoch, err)
	}
	if _, changed, err := r.ChangedSince(q.engine.Pin(), key, append(key, 0), atSecond, keys.MaxEpoch); err != nil || !changed {
		t.Fatalf("changed since %d: %v, %v", atSecond, changed, err)
	}
	q.slot.Leave()

	q.checkOffline(true)
	q.mustOpen()
	q.check(now(), q.want)
	q.set("key-00002", "another")
	checkpoint() // no snapshot needs what was deleted, but the tree has an older version of one of the keys
	q.check(now(), q.want)
	q.set("key-00003", "another")
	if err := q.engine.Rotate(context.Background()); err != nil {
		t.Fatal(err)
	}
	q.check(now(), q.want)
	q.set(orderKey, "two again")
	checkpoint(now())
	third, atThird := maps.Clone(q.want), now()
	q.set(longKeys()[0], "")
	q.set(longKeys()[2], "")
	q.engine.options.disturb = nil
	q.set(orderKey, "seen beside an older version")
	checkpoint(atThird)
	q.check(atThird, third)
	q.check(now(), q.want)
	q.options.disturb = nil // the key with the order error is taken back by the tree
	q.set(orderKey, "three")
	checkpoint()
	q.check(now(), q.want)
	if st := q.engine.Stats(); st.Quarantine.Versions != 0 {
		t.Fatalf("%d versions are left in quarantine", st.Quarantine.Versions)
	}
	if names, err := q.fs.List("db"); err != nil || strings.Contains(strings.Join(names, " "), "quarantine") {
		t.Fatalf("the file is still there: %v, %v", names, err)
	}
	q.checkOffline(false)
}

// TestExpiredKeysLeaveTheQuarantine: no client can overwrite or delete the keys that merges drop because no reader asks for
// them, so a merge removes them from the quarantine, too. Bulk loads are refused while anything is there.
func TestExpiredKeysLeaveTheQuarantine(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	for _, key := range refused() {
		q.set(key, "one")
	}
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	if st := q.engine.Stats(); st.Quarantine.Versions != 4 {
		t.Fatalf("%d versions in quarantine", st.Quarantine.Versions)
	}
	q.set(longKeys()[0], "two") // new versions go, too
	q.set("zz", "is not expired")
	at, key := keys.Epoch(q.visible.Load()), func(user string) []byte { return keys.Append(nil, keys.SpaceUser, []byte(user)) }
	if err := q.engine.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	expired := KeyRange{Lower: key("a"), Upper: key("zz")}
	if err := q.engine.Checkpoint(t.Context(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}, Expired: []Expired{{KeyRange: expired}}}); err != nil {
		t.Fatal(err)
	}
	q.want = map[string]string{"zz": q.want["zz"]}
	q.check(at, q.want)
	load, err := q.engine.NewBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	if err := load.Close(); err != nil {
		t.Fatal(err)
	}
	q.checkOffline(false)
}

// quarantineScript works on a store until it ends or the file system crashes, and returns how many of its commits were durable for certain.
func (q *quarantineBench) script(commits *[]map[string]string) error {
	if err := q.open(); err != nil {
		return err
	}
	commit := func(key, value string) error {
		if err := q.engine.Err(); err != nil {
			return err
		}
		q.set(key, value)
		*commits = append(*commits, maps.Clone(q.want))
		return q.engine.WaitDurable(context.Background(), keys.Epoch(q.visible.Load()))
	}
	q.engine.options.disturb = nil
	for round := range 5 {
		if round == 1 {
			q.engine.options.disturb = disturb
		}
		for i, key := range append(refused(), "key-00001", "key-00099") {
			value := fmt.Sprintf("%d-%d", round, i)
			if (round+i)%4 == 3 {
				value = ""
			}
			if err := commit(key, value); err != nil {
				return errors.Join(err, q.engine.Close())
			}
		}
		live := []keys.Epoch{}
		if round%2 == 1 {
			live = append(live, keys.Epoch(q.visible.Load()-8))
		}
		if err := q.checkpointAt(live...); err != nil {
			return errors.Join(err, q.engine.Close())
		}
	}
	return q.engine.Close()
}

// TestQuarantineSurvivesACrashAtEveryOperation: an entry that the tree refuses is in the log or in quarantine wherever the power is cut, and again
// while the store recovers.
func TestQuarantineSurvivesACrashAtEveryOperation(t *testing.T) {
	whole := vfs.NewMem()
	var commits []map[string]string
	if err := newQuarantineBench(t, whole).script(&commits); err != nil {
		t.Fatal(err)
	}
	ops := whole.Mutations()
	step := int64(exhaustiveStep)
	if testing.Short() {
		step = 5 * exhaustiveStep
	}
	for k := int64(1); k <= ops; k += step {
		fs := vfs.NewMem()
		fs.CrashAt(k)
		commits = commits[:0]
		_ = newQuarantineBench(t, fs).script(&commits)
		for _, keep := range []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll} {
			left := fs.Crash(uint64(k), keep)
			again := left.Crash(uint64(k), vfs.SurviveAll)
			again.CrashAt(1 + k%40)
			q := newQuarantineBench(t, again)
			if err := q.open(); err == nil {
				_ = q.checkpointAt()
				_ = q.engine.Close()
			}
			checkCrashed(t, again.Crash(uint64(k), vfs.SurviveSome), commits, fmt.Sprintf("operation %d of %d, keep %d", k, ops, keep))
		}
	}
}

// checkCrashed finds the last state or the one before: each commit waited for the one before it to be durable.
func checkCrashed(t *testing.T, fs *vfs.Mem, commits []map[string]string, where string) {
	t.Helper()
	q := newQuarantineBench(t, fs)
	if err := q.open(); err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	defer q.mustClose()
	for range 2 {
		got := map[string]string{}
		r := q.engine.NewReader()
		q.slot.Enter()
		for i, key := range append(refused(), "key-00001", "key-00099") {
			v, ok, err := r.Get(keys.Append(nil, keys.SpaceUser, []byte(key)), keys.MaxEpoch)
			if err != nil {
				t.Fatalf("%s: key %d: %v", where, i, err)
			}
			if ok && v.Kind == keys.KindSet {
				got[key] = string(v.Inline())
			}
		}
		q.slot.Leave()
		n := len(commits)
		matches := n == 0 && len(got) == 0 || n > 0 && maps.Equal(got, commits[n-1]) || n == 1 && len(got) == 0 || n > 1 && maps.Equal(got, commits[n-2])
		if !matches {
			t.Fatalf("%s: after %d commits: %v", where, n, got)
		}
		if err := q.checkpointAt(); err != nil { // and the same once it is merged
			t.Fatalf("%s: %v", where, err)
		}
	}
}

// TestQuarantineIsBounded: beyond its bounds checkpoints fail and say why, what was written stays readable, and deletions make room.
func TestQuarantineIsBounded(t *testing.T) {
	testseed.SkipUnderRace(t)
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.MemtableBytes, q.options.SegmentBytes = 4<<20, 4<<20 // so large that merges are cut at keys of the input
	q.mustOpen()
	key := func(i int) string { return fmt.Sprintf("%05d%s", i, strings.Repeat("x", 150)) }
	for i := range quarantine.VersionsMax + 1 {
		q.set(key(i), "v")
		if i%4 == 0 {
			q.set(fmt.Sprintf("%05d", i), "the tree takes it")
		}
	}
	if err := q.checkpointAt(); !errors.Is(err, quarantine.ErrFull) || !strings.Contains(err.Error(), "key size") {
		t.Fatalf("a checkpoint with too many refused keys: %v", err)
	}
	q.check(keys.Epoch(q.visible.Load()), q.want)
	q.set(key(0), "")
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	q.check(keys.Epoch(q.visible.Load()), q.want)
	q.checkOffline(true)
}

// TestDamagedQuarantineFile: one damaged byte costs nothing; a file that is damaged twice, or missing, is named, and salvage brings out the rest.
func TestDamagedQuarantineFile(t *testing.T) {
	fs := vfs.NewMem()
	q := newQuarantineBench(t, fs)
	q.mustOpen()
	q.fill()
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	q.mustClose()
	path := quarantinePaths(q.options.Dir)[0]
	size, err := fs.Size(path)
	if err != nil {
		t.Fatal(err)
	}
	flip := func(at int64) {
		t.Helper()
		f, err := fs.Open(path, vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		var b [1]byte
		_, err = f.ReadAt(b[:], at)
		b[0] ^= 4
		if _, write := f.WriteAt(b[:], at); errors.Join(err, write, f.Sync(), f.Close()) != nil {
			t.Fatal(err, write)
		}
	}
	for at := int64(0); at < size; at += 97 * exhaustiveStep {
		flip(at)
		if report, err := Inspect.Files(context.Background(), fs, "db"); err != nil || !slices.Equal(report.Kinds, []string{"quarantine"}) {
			t.Fatalf("byte %d: verify: %v, %+v", at, err, report)
		}
		q.mustOpen()
		if len(q.engine.repairs.made) != 1 {
			t.Fatalf("byte %d: repaired %q", at, q.engine.repairs.made)
		}
		q.check(keys.Epoch(q.visible.Load()), q.want)
		q.mustClose()
	}
	for _, name := range []string{"damaged twice", "missing"} {
		if name == "missing" {
			if err := fs.Remove(path); err != nil {
				t.Fatal(err)
			}
		} else {
			flip(100)
			flip(size/2 + 100)
		}
		var damage *CorruptionError
		if err := q.open(); !errors.As(err, &damage) || damage.File != path {
			t.Fatalf("%s: %v", name, err)
		}
		report, err := Inspect.Files(context.Background(), fs, "db")
		if err != nil || !slices.Equal(report.Kinds, []string{"quarantine"}) {
			t.Fatalf("%s: verify: %v, %+v", name, err, report)
		}
		count := 0
		lost, err := Inspect.Salvage(context.Background(), fs, "db", func([]byte, []byte, keys.Epoch) error { count++; return nil })
		if err != nil || count != 99 || !slices.Equal(lost.Kinds, []string{"quarantine"}) {
			t.Fatalf("%s: salvage: %d keys, %v, %+v", name, count, err, lost)
		}
	}
}

// TestVerificationNamesAQuarantineBesideALostSuperblock: what the log lacks of a state whose successor's superblock is lost is no damage of its own;
// what the quarantine lacks is.
func TestVerificationNamesAQuarantineBesideALostSuperblock(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	q.fill()
	for range 2 {
		if err := q.checkpointAt(); err != nil {
			t.Fatal(err)
		}
		q.set("key-00001", "again")
	}
	q.mustClose()
	damage := func(path string, at ...int64) {
		t.Helper()
		f, err := q.fs.Open(path, vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		for _, offset := range at {
			_, write := f.WriteAt([]byte("damage"), offset)
			err = errors.Join(err, write)
		}
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	damage(Files{q.fs, "db"}.DataPath(), q.newestSuperblocks()...)
	kinds := func() []string {
		t.Helper()
		report, err := Inspect.Files(context.Background(), q.fs, "db")
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(report.Kinds)
		return slices.Compact(report.Kinds)
	}
	if got := kinds(); !slices.Equal(got, []string{"superblock"}) {
		t.Fatalf("with a lost superblock: %q", got)
	}
	path := quarantinePaths("db")[0]
	size, err := q.fs.Size(path)
	if err != nil {
		t.Fatal(err)
	}
	damage(path, 100, size/2+100)
	if got := kinds(); !slices.Equal(got, []string{"quarantine", "superblock"}) {
		t.Fatalf("and with a damaged quarantine: %q", got)
	}
}

// newestSuperblocks are the offsets of the superblock of the newest checkpoint and its copies.
func (q *quarantineBench) newestSuperblocks() (offsets []int64) {
	q.t.Helper()
	f, err := q.fs.Open(Files{q.fs, "db"}.DataPath(), vfs.ReadWrite)
	if err != nil {
		q.t.Fatal(err)
	}
	size, err := f.Size()
	newest, buf := uint64(0), make([]byte, q.options.PageSize)
	for at := int64(0); err == nil && at < size; at += int64(len(buf)) {
		_, err = f.ReadAt(buf, at)
		h := page.ReadHeader(buf)
		if h.Type != page.TypeSuperblock || h.Checkpoint < newest {
			continue
		}
		if h.Checkpoint > newest {
			newest, offsets = h.Checkpoint, nil
		}
		offsets = append(offsets, at+100)
	}
	if err := errors.Join(err, f.Close()); err != nil || len(offsets) < 2 {
		q.t.Fatalf("superblocks at %d: %v", offsets, err)
	}
	return offsets
}

// TestQuarantineNewerThanItsStateIsIgnored: a checkpoint that wrote the file and did not get further leaves versions that the log brings again, or that a
// repair of the log has dropped.
func TestQuarantineNewerThanItsStateIsIgnored(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	q.fill()
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	defer q.mustClose()
	state := q.engine.pager.State()
	for _, cut := range []keys.Epoch{state.Epoch, state.Epoch - 1, state.Epoch - 3, 1} {
		state.Epoch = cut
		versions, _, err := Files{q.fs, "db"}.ReadQuarantine(&state)
		if err != nil {
			t.Fatal(err)
		}
		want := 0
		for _, v := range q.engine.checkpoints.quarantine.now.versions {
			if v.Trailer.Epoch() <= cut {
				want++
			}
		}
		if len(versions) != want || cut == state.Epoch-1 && want == 4 {
			t.Fatalf("%d versions at a state of epoch %d, want %d", len(versions), cut, want)
		}
	}
}

// TestQuarantineIsWrittenWhenItChanges: the file that a durable superblock uses was synced before, so that a start has nothing to write again.
func TestQuarantineIsWrittenWhenItChanges(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	q.fill()
	var writes atomic.Int64
	q.fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpWrite && strings.Contains(name, "quarantine") {
			writes.Add(1)
		}
	})
	checkpoint := func(key string, want int64) {
		t.Helper()
		q.set(key, fmt.Sprint("written ", want))
		if err := q.checkpointAt(); err != nil || writes.Load() != want {
			t.Fatalf("%d writes, want %d: %v", writes.Load(), want, err)
		}
	}
	checkpoint("key-00001", 2)
	checkpoint("key-00001", 2)
	q.mustClose()
	q.mustOpen()
	checkpoint("key-00001", 2)
	checkpoint(refused()[0], 4)
	q.mustClose()
}

// TestQuarantineThatIsNewerThanItsStateIsWrittenAgain: a state whose file has versions that a repair of the log has
// dropped does not bring them back when its epoch has passed theirs.
func TestQuarantineThatIsNewerThanItsStateIsWrittenAgain(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	q.fill()
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	state := q.engine.pager.State()
	versions := append(slices.Clone(q.engine.checkpoints.quarantine.now.versions), quarantine.Version{
		Key: append([]byte{byte(keys.SpaceUser)}, "zz"+strings.Repeat("x", 200)...), Trailer: keys.MakeTrailer(state.Epoch+2, keys.KindSet), Value: []byte("dropped"),
	})
	number, err := q.engine.checkpoints.quarantine.files.Write(versions)
	setQuarantineFile(&state, number)
	if err = errors.Join(err, q.engine.writeState(state)); err != nil {
		t.Fatal(err)
	}
	q.mustClose()
	q.mustOpen()
	for i := range 5 {
		q.set(fmt.Sprintf("key-%05d", i), "new")
	}
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	q.checkNow()
	q.mustClose()
	q.mustOpen()
	q.checkNow()
	q.checkOffline(true)
}

// TestUnknownStateHasWhatBothQuarantineFilesHold: without a superblock either file may be the used one, and a reserve that holds nothing is no damage.
func TestUnknownStateHasWhatBothQuarantineFilesHold(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.DiskReserve = DiskReserveDerived
	q.mustOpen()
	defer q.mustClose()
	read := func(want ...string) {
		t.Helper()
		versions, fault, err := Files{q.fs, "db"}.ReadAllQuarantine()
		var got []string
		for i := range versions {
			got = append(got, string(versions[i].Value))
		}
		slices.Sort(got)
		if fault != nil || err != nil || !slices.Equal(slices.Compact(got), want) {
			t.Fatalf("%q, want %q; %v, %v", got, want, fault, err)
		}
	}
	read()
	q.fill()
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	read("one", "plain")
	q.set(refused()[0], "two")
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	read("one", "plain", "two")
}

// TestUnknownStateKnowsAReserveThatWasEnlarged: the contents of the unused file are not where a file of its new size has
// them, which is no damage. Damage of both files is named for each.
func TestUnknownStateKnowsAReserveThatWasEnlarged(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.DiskReserve = DiskReserveDerived
	q.mustOpen()
	q.fill()
	for _, value := range []string{"two", strings.Repeat("large", 10_000)} {
		q.set(refused()[0], value)
		if err := q.checkpointAt(); err != nil {
			t.Fatal(err)
		}
	}
	q.engine.CheckSpace()
	files := Files{q.fs, "db"}
	if versions, fault, err := files.ReadAllQuarantine(); err != nil || fault != nil || len(versions) < 4 {
		t.Fatalf("%d versions, %v, %v", len(versions), fault, err)
	}
	q.mustClose()
	for _, name := range quarantinePaths("db") {
		f, err := q.fs.Open(name, vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		size, err := f.Size()
		_, first := f.WriteAt([]byte("damage"), 50)
		_, second := f.WriteAt([]byte("damage"), size/2+50)
		if err := errors.Join(err, first, second, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	_, _, err := files.ReadAllQuarantine()
	for _, name := range quarantinePaths("db") {
		if err == nil || !strings.Contains(err.Error(), name+" is damaged") {
			t.Errorf("%s is not named in %v", name, err)
		}
	}
}

// TestRefusedKeysAreNamedTogether: a merge names every key that it refuses, so that one more attempt
// puts all of them into quarantine, whatever the order of workers.
func TestRefusedKeysAreNamedTogether(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	q.fill()
	if err := q.engine.Rotate(context.Background()); err != nil {
		t.Fatal(err)
	}
	at := keys.Epoch(q.visible.Load())
	job := mergeJob{immutables: q.engine.complete(at), watermarks: GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}}
	_, _, err := q.engine.tryMerge(context.Background(), btree.Root{}, &job, at)
	found, ok := errors.AsType[*btree.RefusedError](err)
	if !ok || found.Total != 4 || len(found.Entries) != 4 || !errors.Is(found.Entries[0].Err, btree.ErrKeySize) || !errors.Is(found.Entries[2].Err, btree.ErrInputOrder) && !errors.Is(found.Entries[1].Err, btree.ErrInputOrder) {
		t.Fatalf("%v: %+v", err, found)
	}
	if n := len(keys.User(found.Entries[0].Key)); n <= page.UserKeyMax(512) {
		t.Fatalf("a key of %d bytes is refused", n)
	}
	q.mustClose()
}
