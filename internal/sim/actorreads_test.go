package sim

import (
	"context"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// look reads keys: the newest state, or a snapshot that stays open.
func (w *actor) look(ctx context.Context) {
	switch n := w.rng.IntN(10); {
	case n < 4:
		w.get(w.x, w.key(), 0, w.ledger.floor())
	case n < 6 && len(w.pinned) < 2:
		floor := w.ledger.floor()
		x, err := w.s.Session()
		if err != nil {
			w.refused("session", err)
			return
		}
		at, err := x.OpenSnapshot(0)
		if err != nil || at < floor {
			w.ledger.fail("snapshot %d after %d was acknowledged: %v", at, floor, err)
		}
		w.pinned = append(w.pinned, &view{x, at})
	case n < 8 && len(w.pinned) > 0:
		i := w.rng.IntN(len(w.pinned))
		p := w.pinned[i]
		w.scan(ctx, p.x, p.at)
		w.get(p.x, w.key(), p.at, 0)
		if w.rng.IntN(2) == 0 {
			p.x.Close()
			w.pinned = slices.Delete(w.pinned, i, i+1)
		}
	case n < 9:
		at, err := w.x.OpenSnapshot(0)
		if err == nil {
			w.readAll(ctx, at)
			w.x.CloseSnapshot()
		}
	default:
		w.scanAll(w.ledger.floor())
	}
}

// sighted notes what was seen. It reports whether it may be shown.
func (w *actor) sighted(g sight, await keys.Epoch) bool {
	g.shown = await == 0 || w.s.AwaitDurable(w.ctx, await) == nil
	w.sightedIn(g)
	return g.shown
}

// sightedIn notes what was seen, but not that it was shown.
func (w *actor) sightedIn(g sight) {
	g.clock, g.elapsed = w.s.Clock().Now()/1000, w.elapsed()
	w.ledger.later(func(s *states) error { return g.check(s) })
}

// get reads a key: the newest version, or in a view, whose epoch is zero if the store was empty, that of its snapshot.
func (w *actor) get(x *mvcc.Session, key string, at, floor keys.Epoch) {
	var v mvcc.Value
	var err error
	view := x != w.x
	if !view {
		v, err = x.Get(nil, []byte(key), 0)
	} else {
		v, err = x.Read(nil, []byte(key))
	}
	if err != nil {
		w.refused("get", err)
		return
	}
	if v.At < floor || view && v.At != at {
		w.ledger.fail("get at %d, want %d, after %d was acknowledged", v.At, at, floor)
	}
	f, _ := x.Metadata()
	w.total.add("get")
	w.sighted(sight{key: key, at: v.At, found: v.Found, value: string(v.Data), epoch: v.Epoch, expires: f.ExpiresAt}, v.Await)
}

func (w *actor) readAll(ctx context.Context, at keys.Epoch) {
	var list [][]byte
	for range 5 {
		list = append(list, []byte(w.key()))
	}
	err := w.x.ReadAll(ctx, list, func(i int, v mvcc.Value) error {
		w.sighted(sight{key: string(list[i]), at: at, found: v.Found, value: string(v.Data), epoch: v.Epoch}, v.Await)
		return nil
	})
	if err != nil {
		w.refused("read all", err)
	}
}

// scanAll compares everything.
func (w *actor) scanAll(floor keys.Epoch) {
	at, err := w.x.OpenSnapshot(0)
	if err != nil || at < floor {
		w.ledger.fail("snapshot %d after %d was acknowledged: %v", at, floor, err)
		return
	}
	defer w.x.CloseSnapshot()
	w.scanRange(context.Background(), w.x, at, "a", "z")
}

func (w *actor) scan(ctx context.Context, x *mvcc.Session, at keys.Epoch) {
	lower, upper := w.bounds()
	w.scanRange(ctx, x, at, lower, upper)
}

func (w *actor) scanRange(ctx context.Context, x *mvcc.Session, at keys.Epoch, lower, upper string) {
	cur, err := x.Scan(mvcc.ScanOptions{Lower: []byte(lower), Upper: []byte(upper), Reverse: w.rng.IntN(3) == 0, Context: ctx})
	if err != nil {
		w.refused("scan", err)
		return
	}
	seen, shown := map[string]bool{}, true
	for cur.Next() {
		f, _ := cur.Metadata()
		g := sight{key: string(cur.Key()), at: at, found: true, value: string(cur.Value()), epoch: cur.Epoch(), expires: f.ExpiresAt}
		if seen[g.key] {
			w.ledger.fail("scan at %d returns %s twice", at, g.key)
		}
		seen[g.key] = true
		shown = w.sighted(g, cur.Await()) && shown
		if w.rng.IntN(8) == 0 {
			cur.Pause()
		}
	}
	await := cur.Await()
	err = cur.Err()
	cur.Close()
	if err != nil {
		w.refused("scan", err)
		return
	}
	w.total.add("scan")
	g := sight{at: at, clock: w.s.Clock().Now() / 1000, elapsed: w.elapsed(), shown: shown && (await == 0 || w.s.AwaitDurable(w.ctx, await) == nil)}
	w.ledger.later(func(s *states) error {
		for _, key := range s.within(lower, upper) {
			if g.key = key; !seen[key] {
				if err := g.check(s); err != nil {
					return fmt.Errorf("scan: %w", err)
				}
			}
		}
		return nil
	})
}
