package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/testseed"
)

// archived is an archive of small files, made without a store.
type archived struct {
	t      testing.TB
	target *objectstore.Faulty
	place  *place
	rng    *rand.Rand
	last   Link
	all    []Record // that are in it
}

func newArchived(t testing.TB) *archived {
	t.Helper()
	store, err := objectstore.Open("file://"+t.TempDir(), objectstore.Options{Retry: objectstore.Retry{Attempts: 1}})
	if err != nil {
		t.Fatal(err)
	}
	target := objectstore.NewFaulty(store)
	return &archived{t: t, target: target, place: &place{target, testLineage}, rng: rand.New(rand.NewPCG(testseed.Base(t), 3))}
}

// file adds a file of some records: commits, no-ops, skipped epochs.
func (a *archived) file(records int) Info {
	a.t.Helper()
	h := Header{Lineage: testLineage, First: a.last.Epoch + 1, Begin: Linked, Link: a.last, Level: 2}
	if a.last.Epoch == 0 {
		h.Begin, h.Link = BeginsFirst, Link{}
	}
	list := make([]Record, 0, records)
	for e, term := h.First, a.last.Term; len(list) < records; e++ {
		rec := Record{Epoch: e, Term: term}
		switch a.rng.IntN(10) {
		case 0: // a no-op
		case 1:
			e += keys.Epoch(a.rng.IntN(50))
			term += keys.Term(a.rng.IntN(2))
			rec = Record{Epoch: e, Term: term, Skipped: true}
		default:
			rec.Body = body(a.t, 1_700_000_000_000_000+uint64(e), fmt.Sprintf("key %d", a.rng.IntN(100)), bytes.Repeat([]byte{byte(e)}, a.rng.IntN(300)))
		}
		list = append(list, rec)
	}
	return a.put(h, list)
}

func (a *archived) put(h Header, list []Record) Info {
	a.t.Helper()
	info, data := write(a.t, h, list)
	if err := a.target.Create(a.t.Context(), a.place.name(logDir, FileName(info.First, info.Last.Epoch)), objectstore.Bytes(data)); err != nil {
		a.t.Fatal(err)
	}
	a.all, a.last = append(a.all, list...), info.Last
	return info
}

// merger makes passes with small files and without a delay.
func (a *archived) merger() *merger {
	m := newMerger(a.place, func(context.Context) error { return nil }, func(func(*MergeStats)) {})
	m.options = MergeOptions{Files: 4, Bytes: 200 << 10, Grace: time.Nanosecond}
	m.options.setDefaults()
	return m
}

func (a *archived) names() (names []string) {
	a.t.Helper()
	list, err := a.place.files(a.t.Context())
	if err != nil {
		a.t.Fatal(err)
	}
	for _, f := range list {
		names = append(names, f.base())
	}
	return names
}

// replayed returns the records that a plan leads to.
func (a *archived) replayed(base Point, target Target) (list []Record, err error) {
	plan, err := NewPlan(a.t.Context(), a.target, testLineage, base, target, "")
	if err != nil {
		return nil, err
	}
	_, err = plan.Replay(a.t.Context(), func(rec Record) error {
		rec.Body = bytes.Clone(rec.Body)
		list = append(list, rec)
		return nil
	})
	return list, err
}

// whole checks that the archive leads from some epoch to any other one, with all records between.
func (a *archived) whole() {
	a.t.Helper()
	for i := range 4 {
		from, to := 0, len(a.all)
		if i > 0 {
			from = a.rng.IntN(len(a.all) - 1)
			to = from + 1 + a.rng.IntN(len(a.all)-from-1)
		}
		base := Point{}
		if from > 0 {
			base.Epoch, base.Term = a.all[from-1].Epoch, a.all[from-1].Term
		}
		got, err := a.replayed(base, Target{Epoch: a.all[to-1].Epoch})
		if err != nil || !same(got, a.all[from:to]) {
			a.t.Fatalf("records %d to %d of %d: %d records, %v; files %v", from, to, len(a.all), len(got), err, a.names())
		}
	}
}

// TestMergedFilesHaveTheRecordsOfTheirParts: files become few, and each state is restored before, while parts are still there, and after
// they are gone.
func TestMergedFilesHaveTheRecordsOfTheirParts(t *testing.T) {
	a := newArchived(t)
	m := a.merger()
	var counted MergeStats
	m.count = func(change func(*MergeStats)) { change(&counted) }
	for i := range 300 {
		a.file(1 + a.rng.IntN(6))
		if i%7 == 0 {
			if err := m.pass(t.Context()); err != nil {
				t.Fatal(err)
			}
			a.whole()
		}
	}
	for range 3 {
		if err := m.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.whole()
	if names := a.names(); len(names) > 40 {
		t.Fatalf("%d files are left: %v", len(names), names)
	}
	if s := counted; s.Created == 0 || s.Merged < 4*s.Created || s.Deleted+uint64(len(a.names())) != 300+s.Created {
		t.Fatalf("%+v, %d files", s, len(a.names()))
	}
	list, err := a.place.files(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range list {
		if info, err := a.place.info(t.Context(), &list[i]); err != nil || info.Bytes > m.options.Bytes {
			t.Fatalf("%s has %d bytes: %v", list[i].base(), info.Bytes, err)
		}
	}
}

// TestMergeThatIsEndedAtAnyOperationLosesNothing: a pass is ended at each operation of the target, with an answer that is lost or without
// one, or meets any other fault of it: each state can be restored, and a later pass goes on.
func TestMergeThatIsEndedAtAnyOperationLosesNothing(t *testing.T) {
	for _, kind := range []objectstore.FaultKind{objectstore.FailForGood, objectstore.FailAfter, objectstore.FailExists, objectstore.CreatePartial, objectstore.CreateNothing, objectstore.ReadShort, objectstore.ReadFlipped} {
		a := newArchived(t)
		for n := 1; ; n += exhaustiveStep {
			for range 6 {
				a.file(3)
			}
			fault := objectstore.Fault{Nth: n, Kind: kind, Sticky: kind == objectstore.FailForGood, Bytes: 100}
			switch kind {
			case objectstore.FailExists, objectstore.CreatePartial, objectstore.CreateNothing:
				fault.Op = objectstore.OpCreate
			case objectstore.ReadShort, objectstore.ReadFlipped:
				fault.Op = objectstore.OpRead
			}
			rule := a.target.Inject(fault)
			m := a.merger() // of a process that has begun again
			_ = m.pass(t.Context())
			fired := a.target.Fired(rule) > 0
			a.target.Heal()
			if kind != objectstore.CreatePartial || !fired { // a target that breaks its promises may have half of a file until the next pass
				a.whole()
			}
			for range 3 {
				_ = a.merger().pass(t.Context())
			}
			a.whole()
			if !fired || n > 60 {
				break
			}
		}
		if n := len(a.names()); n > 60 {
			t.Errorf("fault %d: %d files are left", kind, n)
		}
	}
}

// TestPartsStayWhileARestoreRuns: and until they are old enough.
func TestPartsStayWhileARestoreRuns(t *testing.T) {
	a := newArchived(t)
	for range 20 {
		a.file(3)
	}
	m := a.merger()
	a.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Nth: 1, Kind: objectstore.CreateTwice}) // by a proxy
	lease, err := TakeLease(t.Context(), a.target, testLineage.String())
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		a.file(1)
		if err := m.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(a.names()); n < 24 || !m.waiting {
		t.Fatalf("%d files are left although a restore runs", n)
	}
	if err := a.target.Delete(t.Context(), lease.name()); err != nil {
		t.Fatal(err)
	}
	m.options.Grace = time.Hour
	if err := m.pass(t.Context()); err != nil || len(a.names()) < 24 {
		t.Fatalf("%d files are left within the hour, %v", len(a.names()), err)
	}
	m.options.Grace = time.Nanosecond
	a.file(1)
	if err := m.pass(t.Context()); err != nil || len(a.names()) > 10 {
		t.Fatalf("%d files are left: %v", len(a.names()), err)
	}
	a.whole()
}

// TestNothingIsMergedAcrossABreak: files that do not follow each other stay apart, and so does what another history has.
func TestNothingIsMergedAcrossABreak(t *testing.T) {
	a := newArchived(t)
	for range 5 {
		a.file(2)
	}
	before := a.last
	h := Header{Lineage: testLineage, First: a.last.Epoch + 1, Begin: BeginsGap, Level: 2} // begins anew at the next epoch
	a.put(h, []Record{{Epoch: h.First, Term: a.last.Term}})
	for range 5 {
		a.file(2)
	}
	m := a.merger()
	for range 3 {
		a.file(1)
		if err := m.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	missing := new(MissingError)
	if _, err := a.replayed(Point{}, Target{Epoch: a.last.Epoch}); !errors.As(err, &missing) || missing.Latest.Epoch != before.Epoch {
		t.Fatalf("the break is not there any more: %v", err)
	}
	if got, err := a.replayed(Point{}, Target{Epoch: before.Epoch}); err != nil || len(got) != 10 {
		t.Fatalf("%d records, %v", len(got), err)
	}
	merged := 0
	for _, f := range mustFiles(t, a) {
		if f.first <= before.Epoch && f.last > before.Epoch {
			t.Fatalf("%s is across the break at epoch %d", f.base(), before.Epoch)
		}
		if f.first == h.First && f.last > h.First || f.last == before.Epoch && f.first == 1 {
			merged++
		}
	}
	if merged != 2 {
		t.Fatalf("%d files begin or end at the break: %v", merged, a.names())
	}
}

// TestFileOfAnotherHistoryIsNotDeleted: it has the epochs of a merged file, and other records. A plan says so.
func TestFileOfAnotherHistoryIsNotDeleted(t *testing.T) {
	a := newArchived(t)
	for range 8 {
		a.file(3)
	}
	m := a.merger()
	if err := m.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	of := a.all[5:9]
	link := a.all[4].Link()
	other := slices.Clone(of)
	other[1] = Record{Epoch: of[1].Epoch, Term: of[1].Term, Skipped: of[1].Skipped}
	if !of[1].Skipped {
		other[1].Body = body(t, 1_700_000_000_000_001, "other", nil)
	}
	w := NewWriter()
	w.Reset(Header{Lineage: testLineage, First: link.Epoch + 1, Link: link, Level: 2})
	for i := range other[:2] {
		if err := w.Append(&other[i]); err != nil {
			t.Fatal(err)
		}
	}
	info, data := w.Finish()
	name := FileName(info.First, info.Last.Epoch)
	if info.Last == of[1].Link() {
		t.Skip("the record of the other history is the same") // skipped epochs
	}
	if err := a.target.Create(t.Context(), a.place.name(logDir, name), objectstore.Bytes(data)); err != nil {
		t.Fatal(err)
	}
	a.file(1)
	if err := m.pass(t.Context()); !errors.Is(err, errForeign) || !strings.Contains(err.Error(), name) {
		t.Fatalf("%v", err)
	}
	if !slices.Contains(a.names(), name) {
		t.Fatal("the only file with these records was deleted")
	}
	forked := new(ForkError)
	if _, err := a.replayed(Point{}, Target{Epoch: a.last.Epoch}); !errors.As(err, &forked) || forked.Epoch != of[1].Epoch {
		t.Fatalf("%v", err)
	}
	a.file(1)
	if err := m.pass(t.Context()); err != nil {
		t.Fatalf("it is reported again and again: %v", err)
	}
}

// newMerged is an archive of eight files that are merged, and whose parts are still there.
func newMerged(t *testing.T) (*archived, *merger) {
	t.Helper()
	a := newArchived(t)
	for range 8 {
		a.file(3)
	}
	m := a.merger()
	m.options.Grace = time.Hour
	if err := m.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	return a, m
}

// TestDamagedMergedFileIsMadeAgain: as long as all of its parts are there.
func TestDamagedMergedFileIsMadeAgain(t *testing.T) {
	a, m := newMerged(t)
	a.damageMerged()
	m.options.Grace = time.Nanosecond
	a.file(1)
	if err := m.pass(t.Context()); !errors.Is(err, ErrDamaged) {
		t.Fatalf("%v", err)
	}
	a.whole()
	for range 2 {
		a.file(1)
		if err := m.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	a.whole()
	if n := len(a.names()); n > 4 {
		t.Fatalf("%d files are left", n)
	}
}

// TestDamagedMergedFileWithoutAllPartsStays: what is intact of it can be recovered by hand.
func TestDamagedMergedFileWithoutAllPartsStays(t *testing.T) {
	a, m := newMerged(t)
	merged := a.damageMerged()
	if err := a.target.Delete(t.Context(), merged.inside[2].name); err != nil {
		t.Fatal(err)
	}
	m.options.Grace = time.Nanosecond
	for range 3 {
		a.file(1)
		_ = m.pass(t.Context())
	}
	if names := a.names(); !slices.Contains(names, merged.base()) || len(names) < 8 {
		t.Fatalf("%v", names)
	}
}

// TestAMergeOpensABoundedNumberOfFiles: an upload ends after some time, and a bucket takes a part of it to open each file. Many wait if merges have
// failed for days.
func TestAMergeOpensABoundedNumberOfFiles(t *testing.T) {
	var list []cover
	for e := range keys.Epoch(mergeWindow) {
		list = append(list, cover{file: file{name: FileName(e+1, e+1), first: e + 1, last: e + 1, size: 500}})
	}
	m := newArchived(t).merger()
	m.options.Bytes = mergeBytes
	merged := 0
	for _, group := range m.groups(list) {
		if merged += len(group); len(group) > mergePartsMax {
			t.Fatalf("a group of %d files", len(group))
		}
	}
	if merged != len(list) {
		t.Fatalf("%d of %d files are merged", merged, len(list))
	}
}

// TestAPlanTakesThePartsOfADamagedMergedFile: as long as they are there. What only the damaged file has is never left out without an error.
func TestAPlanTakesThePartsOfADamagedMergedFile(t *testing.T) {
	a, _ := newMerged(t)
	merged := covers(mustFiles(t, a))[0]
	data, err := a.place.read(t.Context(), merged.name, 0, merged.size)
	if err != nil || len(merged.inside) < 2 {
		t.Fatalf("%+v, %v", merged, err)
	}
	data[len(data)-20] ^= 1
	if err := errors.Join(a.target.Delete(t.Context(), merged.name), a.target.Create(t.Context(), merged.name, objectstore.Bytes(data))); err != nil {
		t.Fatal(err)
	}
	a.whole()
	if got, err := a.replayed(Point{}, Target{}); err != nil || !same(got, a.all) {
		t.Fatalf("the latest state: %d of %d records, %v", len(got), len(a.all), err)
	}
	if err := a.target.Delete(t.Context(), merged.inside[len(merged.inside)-1].name); err != nil {
		t.Fatal(err)
	}
	for _, target := range []Target{{}, {Epoch: merged.last}} {
		if _, err := a.replayed(Point{}, target); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%v without the last part: %v", target, err)
		}
	}
}

// damageMerged changes a byte of the first merged file.
func (a *archived) damageMerged() cover {
	a.t.Helper()
	merged := covers(mustFiles(a.t, a))[0]
	data, err := a.place.read(a.t.Context(), merged.name, 0, merged.size)
	if err != nil || len(merged.inside) < 2 {
		a.t.Fatalf("%+v, %v", merged, err)
	}
	data[headerSize+40] ^= 1
	if err := errors.Join(a.target.Delete(a.t.Context(), merged.name), a.target.Create(a.t.Context(), merged.name, objectstore.Bytes(data))); err != nil {
		a.t.Fatal(err)
	}
	return merged
}

func mustFiles(t testing.TB, a *archived) []file {
	t.Helper()
	list, err := a.place.files(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// TestAYearOfSmallFilesIsFewFiles: whatever the sizes are, the files stay few, and each byte is written a few times.
func TestAYearOfSmallFilesIsFewFiles(t *testing.T) {
	for _, size := range []int64{500, 20_000, 1 << 20, 10 << 20} {
		m := newMerger(nil, nil, nil)
		m.options.setDefaults()
		var list []cover
		written, total, most := int64(0), int64(0), 0
		const count = 60_000 / exhaustiveStep
		for i := range count {
			f := file{name: FileName(keys.Epoch(i+1), keys.Epoch(i+1)), first: keys.Epoch(i + 1), last: keys.Epoch(i + 1), size: size + int64(i%7)*size/10}
			list, total = append(list, cover{file: f}), total+f.size
			if i%mergeFiles != 0 {
				continue
			}
			for _, group := range m.groups(list) {
				one := file{first: group[0].first, last: group[len(group)-1].last}
				for _, f := range group {
					one.size += f.size
				}
				one.name = FileName(one.first, one.last)
				written += one.size
				at := slices.IndexFunc(list, func(c cover) bool { return c.first == one.first })
				list = slices.Replace(list, at, at+len(group), cover{file: one})
			}
			large := int(total/(mergeBytes/mergeGrowth)) + 1
			most = max(most, len(list)-large)
		}
		if amplification := float64(written) / float64(total); most > 150 || amplification > 6 {
			t.Errorf("files of %d bytes: %d more than large ones, each byte is written %.1f times by merges", size, most, amplification)
		} else {
			t.Logf("files of %d bytes: %d of %d are left, each byte is written %.1f times by merges", size, len(list), count, amplification)
		}
	}
}

// BenchmarkPlan is the plan for 10,000 files, which has a bar of 5 s: alone; and with merged files that cover them, as an archiver has them for
// an hour. One that reads each file whole would be a hundred times slower.
func BenchmarkPlan(b *testing.B) {
	for _, merged := range []bool{false, true} {
		b.Run(fmt.Sprintf("merged=%v", merged), func(b *testing.B) {
			a := newArchived(b)
			for range 10_000 {
				a.file(1)
			}
			want := 10_000
			if m := a.merger(); merged {
				m.options.Grace, m.options.Bytes = time.Hour, 64<<20
				for range 5 {
					if err := m.pass(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				want = len(covers(mustFiles(b, a)))
			}
			for b.Loop() {
				plan, err := NewPlan(b.Context(), a.target, testLineage, Point{}, Target{Epoch: a.last.Epoch}, "")
				if err != nil || len(plan.Files) != want {
					b.Fatalf("%d files, want %d: %v", len(plan.Files), want, err)
				}
			}
			b.ReportMetric(float64(len(mustFiles(b, a))), "files")
			b.ReportMetric(float64(want), "files-of-the-plan")
		})
	}
}

// wholeReads counts the reads of whole objects.
type wholeReads struct {
	objectstore.Store
	n atomic.Int64
}

func (w *wholeReads) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	if length < 0 {
		w.n.Add(1)
	}
	return w.Store.Read(ctx, name, offset, length)
}

// TestPlanReadsOneEndOfMergedFilesAndTheirParts: a plan is as fast while the parts of merged files are there. If some are gone, merged files are
// read, but not once for each part.
func TestPlanReadsOneEndOfMergedFilesAndTheirParts(t *testing.T) {
	a := newArchived(t)
	m := a.merger()
	m.options.Grace, m.options.Files = time.Hour, 10
	for i := range 105 {
		a.file(2)
		if i%12 != 0 {
			continue
		}
		if err := m.pass(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	store := &wholeReads{Store: a.target}
	plan := func() *Plan {
		plan, err := NewPlan(t.Context(), store, testLineage, Point{}, Target{Epoch: a.last.Epoch}, "")
		if err != nil {
			t.Fatal(err)
		}
		return plan
	}
	list := mustFiles(t, a)
	if tops := covers(list); len(plan().Files) != len(tops) || len(list) < 110 || len(tops) < 2 || store.n.Load() != 0 {
		t.Fatalf("a plan of %d files, of %d and %d, reads %d whole ones", len(plan().Files), len(tops), len(list), store.n.Load())
	}
	for i, c := range covers(list) {
		if len(c.inside) > 1 {
			if err := a.target.Delete(t.Context(), c.inside[i%2].name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if tops := covers(list); len(plan().Files) != len(tops) || store.n.Load() > int64(len(tops)) {
		t.Fatalf("a plan of %d files reads %d whole ones", len(plan().Files), store.n.Load())
	}
	a.whole()
}
