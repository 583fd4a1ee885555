package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// actor is one client of a commotion, or its operator.
type actor struct {
	*commotion
	rng    *rand.Rand
	ctx    context.Context // of the run
	n      int
	x      *mvcc.Session
	lease  *leaseModel
	pinned []*view
	seq    int
}

// view is a snapshot that stays open.
type view struct {
	x  *mvcc.Session
	at keys.Epoch
}

const commotionKeys = 60

func (w *actor) open() {
	if w.x == nil {
		x, err := w.s.Session()
		if err != nil {
			if !errors.Is(err, mvcc.ErrClosed) {
				w.ledger.fail("session: %v", err)
			}
			return
		}
		w.x = x
	}
}

func (w *actor) endSessions() {
	for _, p := range w.pinned {
		p.x.Close()
	}
	w.pinned = nil
	if w.x != nil {
		w.x.Close()
	}
}

// limited is a context that ends at a random moment, one time in four: at once or some milliseconds later.
func (w *actor) limited() (context.Context, context.CancelFunc) {
	switch w.rng.IntN(8) {
	case 0:
		return context.WithTimeout(w.ctx, time.Duration(w.rng.IntN(300))*time.Microsecond)
	case 1:
		return context.WithTimeout(w.ctx, time.Duration(w.rng.IntN(4000))*time.Microsecond)
	}
	return context.WithTimeout(w.ctx, 10*time.Second)
}

// step does one thing, and reports whether to go on.
func (w *actor) step() bool {
	if w.over() || w.ctx.Err() != nil {
		return false
	}
	w.open()
	if w.x == nil {
		return false
	}
	ctx, cancel := w.limited()
	defer cancel()
	n := w.rng.IntN(110)
	began := time.Now()
	defer func() {
		if took := time.Since(began); took > 2*time.Second {
			w.tracef("step %d took %v: leases %+v, short %v, rule %+v", n, took, w.leases.Stats(), w.s.Shortage(), w.rule)
		}
	}()
	switch {
	case n < 22:
		w.put(ctx, nil)
	case n < 32:
		w.invoke(ctx)
	case n < 37:
		w.deleteRange(ctx)
	case n < 52:
		w.transaction(ctx)
	case n < 62:
		w.look(ctx)
	case n < 68:
		w.repeat(ctx)
	case n < 76:
		w.expiring(ctx)
	case n < 84:
		w.leased(ctx)
	case n < 90:
		w.lock(ctx)
	case n < 96:
		w.readPast(ctx)
	case n < 100:
		w.hold(ctx)
	case n < 105:
		w.readNamed(ctx)
	default:
		w.execute(ctx)
	}
	if w.rng.IntN(10) == 0 {
		w.x.Close()
		w.x = nil
	}
	return true
}

// refused judges the error of an operation that has changed nothing.
func (w *actor) refused(what string, err error) {
	w.total.add(what + " refused")
	if !w.expected(err) {
		w.ledger.fail("%s: %v", what, err)
	}
}

func (w *actor) key() string { return fmt.Sprintf("k%03d", w.rng.IntN(commotionKeys)) }

func (w *actor) value() string {
	w.seq++
	sizes := []int{0, 3, 40, 118, 121, 500, 2500}
	return fmt.Sprintf("%d-%d-%x", w.n, w.seq, w.rng.Uint32()) + strings.Repeat("v", sizes[w.rng.IntN(len(sizes))])
}

func (w *actor) durability() mvcc.Durability {
	return []mvcc.Durability{mvcc.DurabilitySync, mvcc.DurabilityAsync}[w.rng.IntN(2)]
}

// begun is what is known before a commit.
func (w *actor) begun(d mvcc.Durability) *commit {
	c := &commit{sync: d == mvcc.DurabilitySync, writes: map[string]written{}}
	if w.s.FeatureLevel() >= keys.FeatureLevelHistory { // else the clock is not that of before after a restart
		c.before = w.s.Clock().Now()
	}
	return c
}

// committed notes a commit, and waits for its acknowledgement.
func (w *actor) committed(ctx context.Context, c *commit, epoch, floor keys.Epoch, what string) {
	c.epoch = epoch
	if epoch <= floor {
		w.ledger.fail("%s: the epoch is %d, after %d was acknowledged", what, epoch, floor)
	}
	w.total.add(what)
	w.ledger.add(c)
	d := mvcc.DurabilityAsync
	if c.sync {
		d = mvcc.DurabilitySync
	}
	if err := w.s.Wait(ctx, epoch, d); err != nil {
		w.refused(what+" wait", err)
		return
	}
	c.after = w.s.Clock().Now()
	w.ledger.acknowledge(epoch, c.sync, what)
}

// revealed waits until what an outcome has shown is durable, and promises it.
func (w *actor) revealed(ctx context.Context) {
	if e := w.x.Await(); e != 0 && w.s.AwaitDurable(ctx, e) == nil {
		w.ledger.promise(e, "outcome")
	}
}

// shown checks that an epoch of which an answer tells is visible: what begins after the answer sees it.
func (w *actor) shown(what string, e keys.Epoch) {
	if visible := w.s.Visible(); visible < e {
		w.ledger.fail("%s: it tells of the epoch %d, and %d is the newest that is visible", what, e, visible)
	}
}

// put commits a plain write, sometimes with conditions.
func (w *actor) put(ctx context.Context, r *mvcc.Request) {
	floor, d := w.ledger.floor(), w.durability()
	c, b := w.begun(d), &mvcc.Write{Durability: d}
	for range 1 + w.rng.IntN(5) {
		key := w.key()
		if _, twice := c.writes[key]; twice {
			continue
		}
		if w.rng.IntN(4) == 0 {
			b.Delete([]byte(key))
			c.writes[key] = written{deleted: true}
		} else {
			v := w.value()
			b.Set([]byte(key), []byte(v))
			c.writes[key] = written{value: v}
		}
	}
	var conditions []mvcc.Condition
	if w.rng.IntN(4) == 0 {
		v, err := w.x.Get(nil, []byte(w.key()), 0)
		if err == nil {
			key := w.key()
			conditions = append(conditions, []mvcc.Condition{
				{Kind: mvcc.KeyAbsent, Key: []byte(key)},
				{Kind: mvcc.KeyPresent, Key: []byte(key)},
				{Kind: mvcc.EpochEquals, Key: []byte(key), Epoch: v.Epoch},
				{Kind: mvcc.ValueEquals, Key: []byte(key), Value: v.Data},
			}[w.rng.IntN(4)])
			b.Conditions = append(b.Conditions, conditions...)
		}
	}
	if r != nil {
		c.request = r.ID
		b.Identify(r)
	}
	epoch, err := w.x.Commit(ctx, b)
	w.revealed(ctx)
	var failed *mvcc.PreconditionError
	switch {
	case err == nil:
		w.checkConditions(conditions, epoch)
		w.committed(ctx, c, epoch, floor, "put")
	case errors.As(err, &failed):
		w.total.add("precondition")
		w.shown("precondition", failed.Epoch)
		w.newestIs(string(failed.Condition.Key), failed.Found, failed.Epoch, floor)
	case r != nil && w.answered(r, err):
	default:
		w.refused("put", err)
	}
}

// checkConditions checks that conditions held when a commit happened.
func (w *actor) checkConditions(conditions []mvcc.Condition, epoch keys.Epoch) {
	for _, q := range conditions {
		w.ledger.later(func(s *states) error {
			v := s.at(string(q.Key), epoch-1)
			holds := map[mvcc.ConditionKind]bool{
				mvcc.KeyAbsent: v.deleted, mvcc.KeyPresent: !v.deleted, mvcc.EpochEquals: !v.deleted && v.epoch == q.Epoch, mvcc.ValueEquals: !v.deleted && v.value == string(q.Value),
			}
			if !holds[q.Kind] {
				return fmt.Errorf("commit %d: condition %d on %s did not hold: %+v", epoch, q.Kind, q.Key, v)
			}
			return nil
		})
	}
}

// newestIs checks that the newest version of a key was this one at some moment after floor was acknowledged.
func (w *actor) newestIs(key string, found bool, epoch, floor keys.Epoch) {
	w.ledger.later(func(s *states) error {
		v := s.at(key, epoch)
		if epoch == 0 { // an operation does not tell the epoch of a deletion
			if v = s.at(key, floor); !v.deleted && !slices.ContainsFunc(s.keys[key], func(v stateVersion) bool { return v.deleted && v.epoch > floor }) {
				return fmt.Errorf("%s: it was not to be there, after %d was acknowledged, want %+v", key, floor, v)
			}
			return nil
		}
		if v.deleted == found || found && v.epoch != epoch {
			return fmt.Errorf("%s: the newest version was to be %v of %d, want %+v", key, found, epoch, v)
		}
		if next, is := s.changed(key, max(epoch, v.epoch), floor+1); is {
			return fmt.Errorf("%s: the newest version was to be %v of %d, after %d was acknowledged", key, found, epoch, next)
		}
		return nil
	})
}

// invoke computes new values from old ones.
func (w *actor) invoke(ctx context.Context) {
	floor, d := w.ledger.floor(), w.durability()
	c := w.begun(d)
	var ops []mvcc.Invoke
	for _, i := range w.rng.Perm(8)[:1+w.rng.IntN(3)] {
		o := mvcc.Invoke{Kind: mvcc.InvokeAdd, Key: fmt.Appendf(nil, "n%d", i), Delta: int64(w.rng.IntN(9))}
		if w.rng.IntN(2) == 0 {
			o = mvcc.Invoke{Key: fmt.Appendf(nil, "k%03d", i), Operand: []byte(w.value()), Expect: []byte("x")}
			o.Kind = []mvcc.InvokeKind{mvcc.InvokeAppend, mvcc.InvokeCompareSet, mvcc.InvokePutIfAbsent, mvcc.InvokeGetAndSet, mvcc.InvokeGetAndDelete}[w.rng.IntN(5)]
			if o.Kind == mvcc.InvokeAppend {
				o.Operand = o.Operand[:3]
			}
		}
		ops = append(ops, o)
	}
	out := make([]mvcc.Invoked, len(ops))
	var r *mvcc.Request
	if w.rng.IntN(3) == 0 {
		r = w.newRequest()
		c.request = r.ID
	}
	epoch, err := w.x.InvokeRequest(ctx, r, ops, nil, d, out)
	for i := range out {
		out[i].Old, out[i].New = slices.Clone(out[i].Old), slices.Clone(out[i].New)
	}
	w.revealed(ctx)
	if err != nil {
		if r == nil || !w.answered(r, err) {
			w.refused("invoke", err)
		}
		return
	}
	for i, o := range out {
		key := string(ops[i].Key)
		if o.Applied {
			c.writes[key] = written{value: string(o.New), deleted: !o.NewFound}
		}
		if epoch == 0 {
			w.shown("invoke", o.OldEpoch)
			w.newestIs(key, o.OldFound, o.OldEpoch, floor)
			continue
		}
		w.ledger.later(func(s *states) error {
			v := s.at(key, epoch-1)
			if v.deleted == o.OldFound || o.OldFound && (v.value != string(o.Old) || v.epoch != o.OldEpoch) {
				return fmt.Errorf("commit %d: operation on %s saw %.30q of %d, want %+v", epoch, key, o.Old, o.OldEpoch, v)
			}
			return nil
		})
	}
	if epoch != 0 {
		w.committed(ctx, c, epoch, floor, "invoke")
	}
}

func (w *actor) bounds() (lower, upper string) {
	lower, upper = w.key(), w.key()
	if upper < lower {
		lower, upper = upper, lower
	}
	return lower, upper + "~"
}

func (w *actor) deleteRange(ctx context.Context) {
	floor, d := w.ledger.floor(), w.durability()
	c := w.begun(d)
	lower, upper := w.bounds()
	o := mvcc.RangeDelete{Lower: []byte(lower), Upper: []byte(upper), Durability: d, Limit: w.rng.IntN(2) * (1 + w.rng.IntN(5))}
	if w.rng.IntN(3) == 0 {
		o.Request, o.Result = w.newRequest(), func(mvcc.RangeDeleted) []byte { return nil }
		c.request = o.Request.ID
	}
	out, err := w.x.DeleteRange(ctx, o)
	w.revealed(ctx)
	var conflict *mvcc.ConflictError
	switch {
	case errors.As(err, &conflict):
		w.total.add("range conflict")
		w.shown("range conflict", conflict.Epoch)
		return
	case err != nil && o.Request != nil && w.answered(o.Request, err):
		return
	case err != nil:
		w.refused("range delete", err)
		return
	}
	if out.Count == 0 {
		w.ledger.later(func(s *states) error {
			if n := len(s.live(lower, upper, out.Epoch)); n > 0 {
				return fmt.Errorf("nothing was deleted at %d in [%s, %s), which has %d keys", out.Epoch, lower, upper, n)
			}
			return nil
		})
		return
	}
	// Which keys it deletes is known once all earlier commits are.
	w.ledger.deletes(func(s *states) error {
		live := s.live(lower, upper, out.Epoch-1)
		if want := len(live); o.Limit > 0 && want > o.Limit {
			live = live[:o.Limit]
		}
		if len(live) != out.Count {
			return fmt.Errorf("the deletion at %d of [%s, %s), at most %d keys, deleted %d, want %d", out.Epoch, lower, upper, o.Limit, out.Count, len(live))
		}
		for _, key := range live {
			c.writes[key] = written{deleted: true}
		}
		return nil
	}, out.Epoch)
	w.committed(ctx, c, out.Epoch, floor, "range delete")
}
