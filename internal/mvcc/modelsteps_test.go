package mvcc

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/vfs"
)

// operation is mostly one that suits a version.
func (r *modelDriver) operation(key string, v modelVersion) Invoke {
	op := Invoke{Key: []byte(key), Kind: InvokeAdd + InvokeKind(r.rng.IntN(10)), Operand: []byte(r.value()), Delta: int64(r.rng.IntN(100) - 50), ExpiresAt: r.deadline()}
	number := op.Kind == InvokeAdd || op.Kind == InvokeMin || op.Kind == InvokeMax
	if _, _, reason := v.invoke(&op); number && reason != "" && !r.one(40) {
		op.Kind = InvokeAppend
	}
	if op.Kind == InvokeAppend && len(v.value) > 4000 {
		op.Kind = InvokeGetAndSet
	}
	if op.Expect = []byte(v.value); r.one(3) {
		op.Expect = op.Operand
	}
	if op.Kind == InvokeAdd {
		op.Bounded, op.Min, op.Max = r.one(2), math.MinInt64, math.MaxInt64
		switch {
		case r.one(100):
			op.Delta = math.MaxInt64
		case r.one(100):
			op.Max = -1000
		}
	}
	return op
}

func (r *modelDriver) invoke() {
	list := r.keys(r.size())
	ops, out := make([]Invoke, len(list)), make([]Invoked, len(list))
	for i, k := range list {
		ops[i] = r.operation(k, r.m.newest(k))
	}
	conditions, request, d := r.conditions(), r.request(), r.durability()
	if r.note("invoke", "%d operations, %d conditions, request %v: %.150q", len(ops), len(conditions), request != nil, list); r.one(2) {
		conditions = nil
	}
	for i := range conditions {
		list = append(list, string(conditions[i].Key))
	}
	epoch, err := r.x.InvokeRequest(r.disturbed(list, request), request, ops, conditions, d, out)
	if r.refused(err, request, conditions) {
		return
	}
	changes := map[string]modelChange{}
	for i := range ops {
		k := string(ops[i].Key)
		v := r.m.newest(k)
		now, applied, reason := v.invoke(&ops[i])
		if reason != "" {
			r.note("type error", "%v", err)
			if failed := new(TypeError); !errors.As(err, &failed) || failed.Index != i {
				r.t.Errorf("operation %d, %+v: %v, want %s", i, ops[i], err, reason)
			}
			return
		}
		if err != nil {
			continue
		}
		if now.epoch = v.epoch; applied {
			changes[k] = modelChange{modelVersion: now, computed: true}
		}
		r.compareInvoked(&ops[i], &out[i], v, now, applied)
	}
	if len(changes) > 0 {
		r.committed(epoch, err, changes, request, d)
	} else if err != nil || epoch != 0 {
		r.t.Errorf("nothing applies, and the epoch is %d: %v", epoch, err)
	}
}

// compareInvoked compares an outcome. The epoch of the version before is that of a value.
func (r *modelDriver) compareInvoked(op *Invoke, out *Invoked, before, now modelVersion, applied bool) {
	epoch := before.epoch
	if !before.found {
		epoch = 0
	}
	if out.Applied != applied || out.OldFound != before.found || string(out.Old) != before.value || out.OldEpoch != epoch ||
		out.NewFound != now.found || string(out.New) != now.value || out.ExpiresAt != now.deadline {
		r.t.Errorf("%s: operation %+.60v on %+.60v: %+.60v, want %v %+.60v", op.Key, *op, before, *out, applied, now)
	}
}

func (r *modelDriver) deleteRange() {
	lower, upper := r.bounds()
	o := RangeDelete{Lower: bound(lower), Upper: bound(upper), Conditions: r.conditions(), Durability: r.durability(), Request: r.request()}
	if !r.one(3) {
		o.Limit = 1 + r.rng.IntN(50)
	}
	o.Result = func(out RangeDeleted) []byte { return fmt.Append(nil, out.Count) }
	list := append(r.m.found(lower, upper, keys.MaxEpoch), r.keys(3)...)
	r.note("delete range", "[%q, %q) limit %d, %d conditions, request %v", lower, upper, o.Limit, len(o.Conditions), o.Request != nil)
	visible := r.m.visible
	out, err := r.x.DeleteRange(r.disturbed(list, o.Request), o)
	if r.refused(err, o.Request, o.Conditions) {
		return
	}
	at := keys.MaxEpoch
	if out.Count == 0 && len(o.Conditions) == 0 && o.Request == nil {
		at = out.Epoch // nothing is written, or compared with a later state
	}
	list = r.m.found(lower, upper, at)
	more := o.Limit > 0 && len(list) > o.Limit
	if more {
		list = list[:o.Limit]
	}
	// Beyond what is deleted nothing is validated.
	if more = more == out.More || visible != r.m.visible; err != nil || out.Count != len(list) || !more {
		r.t.Errorf("deleted %+v, want %d: %v", out, len(list), err)
		return
	}
	if len(list) == 0 {
		if out.Epoch > r.m.visible || out.Epoch < visible {
			r.t.Errorf("nothing deleted at epoch %d, want %d", out.Epoch, r.m.visible)
		}
		return
	}
	changes := map[string]modelChange{}
	for _, k := range list {
		changes[k] = modelChange{}
	}
	r.committed(out.Epoch, nil, changes, o.Request, o.Durability)
}

func (r *modelDriver) askOutcome() {
	if len(r.sent) == 0 {
		return
	}
	sent := *r.sent[r.rng.IntN(len(r.sent))]
	want := r.m.requests[sent.ID]
	if want == nil {
		want = &modelRequest{state: OutcomeNotApplied}
	}
	out, err := r.x.Outcome(r.t.Context(), &sent)
	if r.compareOutcome(out, want); err != nil {
		r.t.Error(err)
	}
	if !r.one(4) {
		return
	}
	out, epoch, err := r.x.Fence(r.t.Context(), &sent, DurabilitySync)
	if r.note("fence", "%+v", out); want.state == OutcomeNotApplied {
		r.committed(epoch, err, nil, nil, DurabilitySync)
		want = &modelRequest{sent: Request{ID: sent.ID, Method: sent.Method, Identity: sent.Identity}, state: OutcomeCancelled, epoch: r.m.visible}
		r.m.log[len(r.m.log)-1].request, r.m.requests[sent.ID] = want, want
		out.Method = want.sent.Method // the outcome of a fence itself has none
	}
	if r.compareOutcome(out, want); err != nil {
		r.t.Error(err)
	}
}

// pinned reports whether an epoch must be readable.
func (r *modelDriver) pinned(at keys.Epoch) bool {
	return at == r.m.visible || slices.ContainsFunc(r.views, func(v *modelView) bool { return v.at == at }) ||
		slices.ContainsFunc(r.txns, func(x *modelTxn) bool { return x.at == at })
}

// past is an epoch, mostly one that can be read, or zero for the newest.
func (r *modelDriver) past() keys.Epoch {
	switch {
	case r.one(2):
		return 0
	case r.one(2) && len(r.views) > 0:
		return r.views[r.rng.IntN(len(r.views))].at
	}
	return 1 + keys.Epoch(r.rng.Uint64N(uint64(r.m.visible)+2))
}

// isGone reports whether an error says that an epoch cannot be read, and whether it may.
func (r *modelDriver) isGone(at keys.Epoch, err error) bool {
	gone := errors.As(err, new(*SnapshotGoneError))
	if at == 0 || r.pinned(at) || at > r.m.visible {
		if want := at > r.m.visible; gone != want {
			r.t.Errorf("epoch %d of %d: %v", at, r.m.visible, err)
		}
	}
	if gone {
		r.note("snapshot gone", "%v", err)
	}
	return gone
}

func (r *modelDriver) read() {
	k, at := r.key(), r.past()
	v, err := r.x.Get(nil, []byte(k), at)
	if r.isGone(at, err) {
		return
	}
	if at == 0 {
		at = r.m.visible
	}
	r.compareValue(k, v, r.m.version(k, at), r.x.Metadata, err)
	if v.At != at {
		r.t.Errorf("read at %d, want %d", v.At, at)
	}
}

func (r *modelDriver) compareValue(key string, v Value, want modelVersion, meta func() (metadata.Fields, error), err error) {
	f, failed := meta()
	if want.found && want.epoch != v.Epoch || err != nil || failed != nil || v.Found != want.found || string(v.Data) != want.value || f != (metadata.Fields{ExpiresAt: want.deadline}) {
		r.t.Errorf("%s is %+.60v, %+v, want %+.60v: %v", key, v, f, want, errors.Join(err, failed))
	}
}

// view opens a snapshot, or reads one of them and perhaps closes it.
func (r *modelDriver) view() {
	if len(r.views) < 3 && r.one(2) {
		x, at := mustSession(r.t, r.s), r.past()
		is, err := x.OpenSnapshot(at)
		if r.isGone(at, err) {
			x.Close()
			return
		}
		if at == 0 {
			at = r.m.visible
		}
		if r.views = append(r.views, &modelView{x, at}); err != nil || is != at {
			r.t.Errorf("a snapshot at %d is at %d: %v", at, is, err)
		}
		r.note("snapshot", "%d", at)
		return
	}
	if len(r.views) == 0 {
		return
	}
	i := r.rng.IntN(len(r.views))
	if r.compareView(r.views[i]); r.one(3) {
		r.views[i].x.Close()
		r.views = slices.Delete(r.views, i, i+1)
	}
}

// compareView reads a snapshot in each way.
func (r *modelDriver) compareView(v *modelView) {
	lower, upper := r.bounds()
	for _, reverse := range []bool{false, true} {
		c, err := v.x.Scan(ScanOptions{Lower: bound(lower), Upper: bound(upper), Reverse: reverse})
		if err != nil {
			r.t.Fatal(err)
		}
		r.compareScan(c, c.Metadata, r.m.found(lower, upper, v.at), reverse, func(k string) modelVersion { return r.m.version(k, v.at) }, math.MaxInt, c.Pause)
		c.Close()
	}
	list, visits := r.keys(r.size()), 0
	internal := make([][]byte, len(list))
	for i, k := range list {
		internal[i] = []byte(k)
	}
	if err := v.x.ReadAll(r.t.Context(), internal, func(i int, got Value) error {
		visits++
		r.compareValue(list[i], got, r.m.version(list[i], v.at), v.x.Metadata, nil)
		return nil
	}); err != nil || visits != len(list) {
		r.t.Errorf("%d of %d keys: %v", visits, len(list), err)
	}
	got, err := v.x.Read(nil, internal[0])
	r.compareValue(list[0], got, r.m.version(list[0], v.at), v.x.Metadata, err)
}

// compareScan reads at most some entries, and returns the last one.
func (r *modelDriver) compareScan(c walker, meta func() (metadata.Fields, error), want []string, reverse bool, version func(string) modelVersion, most int, pause func()) (last string, ended bool) {
	if want = slices.Clone(want); reverse {
		slices.Reverse(want)
	}
	for n := 0; n < most; n++ {
		if !c.Next() {
			if n != len(want) || c.Err() != nil {
				r.t.Errorf("the scan has %d entries, want %d: %v", n, len(want), c.Err())
			}
			return last, true
		}
		last = string(c.Key())
		if n >= len(want) || want[n] != last {
			r.t.Errorf("entry %d is %s, want %q", n, last, want[min(n, len(want)):])
			return last, true
		}
		r.compareValue(last, Value{Found: true, Data: c.Value(), Epoch: c.Epoch()}, version(last), meta, nil)
		if pause != nil && r.one(10) {
			pause()
		}
	}
	return last, false
}

// maintain does what a store does in the background.
func (r *modelDriver) maintain() {
	switch n := r.rng.IntN(6); n {
	case 0, 1:
		r.note("checkpoint", "")
		mustCheckpoint(r.t, r.s)
	case 2, 3:
		r.note("collect", "")
		r.s.collector.collect(nil, true)
		r.s.engine.Reclaim()
	default:
		r.note("cache", "%d", n)
		o := &r.s.options.Storage
		for _, size := range []int64{16 * int64(o.PageSize), o.CacheBytes}[:n-3] {
			if _, err := r.s.ResizeCache(size); err != nil {
				r.t.Error(err)
			}
		}
	}
}

// passDeadlines waits until all keys are deleted whose deadlines have passed, and reads in which epochs they were.
func (r *modelDriver) passDeadlines() {
	_, _ = r.s.Clock().Accept() // a moment earlier is an error, and does no harm
	select {
	case r.s.expirer.wake <- struct{}{}:
	default:
	}
	now := r.s.now()
	due := func(entry string) bool { return modelDeadline(entry) <= now }
	left := func() map[string]bool {
		entries := queue(r.t, r.s)
		maps.DeleteFunc(entries, func(e string, _ bool) bool { return !due(e) })
		return entries
	}
	for began := time.Now(); len(left()) > 0; time.Sleep(time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			r.t.Fatalf("after deadlines have passed the queue still has %v", left())
		}
	}
	commits := map[keys.Epoch]modelCommit{}
	for k := range r.m.versions {
		if v := r.m.newest(k); v.deadline == 0 || v.deadline > now {
			continue
		}
		n, err := r.x.NewestVersion(r.t.Context(), keys.Append(nil, keys.SpaceUser, []byte(k)))
		if err != nil || n.Found || n.Epoch <= r.m.visible || n.Epoch > r.s.Visible() {
			r.t.Errorf("%s is %+v after its deadline: %v", k, n, err)
		}
		if commits[n.Epoch].changes == nil {
			commits[n.Epoch] = modelCommit{epoch: n.Epoch, changes: map[string]modelChange{}}
		}
		commits[n.Epoch].changes[k] = modelChange{computed: true}
	}
	for _, e := range slices.Sorted(maps.Keys(commits)) {
		r.note("deadlines", "%d keys at %d", len(commits[e].changes), e)
		r.m.apply(commits[e])
	}
	r.m.visible, r.durable = r.s.Visible(), r.s.Visible()
	maps.DeleteFunc(r.m.queue, func(e string, _ bool) bool { return due(e) })
	if err := r.s.AwaitDurable(r.t.Context(), r.durable); err != nil { // no crash takes that back
		r.t.Error(err)
	}
}

// modelDeadline is the deadline in an entry of queue, which has 13 digits.
func modelDeadline(entry string) (deadline uint64) {
	_, _ = fmt.Sscan(entry[:13], &deadline)
	return deadline
}

func (r *modelDriver) endAll() {
	for _, x := range r.txns {
		x.x.Close()
	}
	for _, v := range r.views {
		v.x.Close()
	}
	r.txns, r.views = nil, nil
	r.x.Close()
	r.other.Close()
}

// restart closes the store, or cuts the power, after which all commits up to some epoch are there.
func (r *modelDriver) restart() {
	r.endAll()
	if r.one(2) {
		r.note("restart", "")
		mustClose(r.t, r.s)
		r.open()
		return
	}
	left := r.mem.Crash(r.rng.Uint64(), vfs.Survival(r.rng.IntN(3)))
	_ = r.s.Close() // it cannot close well without a disk
	r.o.Storage.FS, r.mem = left, left
	r.open()
}

// adopt takes what a crash has left.
func (r *modelDriver) adopt() {
	at := r.s.Recovery().Epoch
	if r.note("opened", "%d of %d is left, %d was durable", at, r.m.visible, r.durable); at < r.durable || at > r.m.visible {
		r.t.Errorf("epoch %d is left of %d; %d was durable", at, r.m.visible, r.durable)
	}
	if at < r.m.visible {
		r.total["crash"]++
		r.m.truncate(at)
	}
}

// compareAll compares all that can be read of the newest state, and the snapshots.
func (r *modelDriver) compareAll() {
	v := &modelView{mustSession(r.t, r.s), r.m.visible}
	defer v.x.Close()
	if at, err := v.x.OpenSnapshot(0); err != nil || at != v.at {
		r.t.Errorf("the newest snapshot is at %d, want %d: %v", at, v.at, err)
		return
	}
	for _, v := range append(r.views, v) {
		r.compareView(v)
		c, err := v.x.Scan(ScanOptions{})
		if err != nil {
			r.t.Fatal(err)
		}
		r.compareScan(c, c.Metadata, r.m.found("", "", v.at), false, func(k string) modelVersion { return r.m.version(k, v.at) }, math.MaxInt, nil)
		c.Close()
	}
	if entries := queue(r.t, r.s); !maps.Equal(entries, r.m.queue) {
		maps.DeleteFunc(entries, func(e string, _ bool) bool {
			had := r.m.queue[e]
			delete(r.m.queue, e)
			return had
		})
		r.t.Errorf("the expiry queue has %v, and not %v", entries, r.m.queue)
	}
}
