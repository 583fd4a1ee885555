package clients

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Each function of this file makes a command that writes, with random words, and says what it does to the state of now.

func (c *chain) key() string   { return fmt.Sprintf("%c/%d", 'a'+rune(c.rng.IntN(3)), c.rng.IntN(8)) }
func (c *chain) value() string { return strconv.Itoa(c.rng.IntN(1000)) }

// known is a key that exists, if there is one.
func (c *chain) known() string {
	all := slices.Sorted(maps.Keys(c.now))
	if len(all) == 0 || c.rng.IntN(5) == 0 {
		return c.key()
	}
	return all[c.rng.IntN(len(all))]
}

// with is the state of now with a change.
func (c *chain) with(change func(chainState)) chainState {
	after := maps.Clone(c.now)
	change(after)
	return after
}

func (c *chain) put() *chainWrite {
	key, value := c.known(), c.value()
	v, exists := c.now[key]
	w := &chainWrite{args: []string{"put", key, value}}
	next := chainValue{Value: value}
	switch c.rng.IntN(7) {
	case 0:
		w.args, w.code = append(w.args, "--if-absent"), map[bool]int{true: 4}[exists]
	case 1:
		w.args, w.code = append(w.args, "--if-present"), map[bool]int{false: 4}[exists]
	case 2:
		old := cmp.Or(v.Value, "1")
		w.args, w.code = append(w.args, "--if-value", old), map[bool]int{false: 4}[exists]
	case 3:
		epoch := cmp.Or(v.Epoch, 1) + uint64(c.rng.IntN(2))
		w.args, w.code = append(w.args, "--if-epoch", fmt.Sprint(epoch)), map[bool]int{false: 4}[exists && epoch == v.Epoch]
	case 4:
		w.args, next.Expires = append(w.args, "--ttl", "2h"), 1
	}
	w.after = c.with(func(s chainState) { s[key] = next })
	return w
}

func (c *chain) del() *chainWrite {
	if c.rng.IntN(2) == 0 {
		keys := []string{c.known()}
		if other := c.known(); other != keys[0] && c.rng.IntN(2) == 0 {
			keys = append(keys, other)
		}
		return &chainWrite{args: append([]string{"del"}, keys...), after: c.with(func(s chainState) {
			for _, k := range keys {
				delete(s, k)
			}
		})}
	}
	prefix, limit := c.key()[:2], c.rng.IntN(4)
	count, more, after := 0, false, maps.Clone(c.now)
	for _, k := range slices.Sorted(maps.Keys(c.now)) {
		if strings.HasPrefix(k, prefix) {
			if more = limit > 0 && count == limit; !more {
				delete(after, k)
				count++
			} else {
				break
			}
		}
	}
	return &chainWrite{args: []string{"del", "--prefix", prefix, "--limit", fmt.Sprint(limit)}, after: after, check: func(out string) (uint64, error) {
		var printed struct {
			Deleted int    `json:"deleted"`
			Epoch   uint64 `json:"epoch"`
			More    bool   `json:"more"`
		}
		if err := json.Unmarshal([]byte(out), &printed); err != nil {
			return 0, err
		}
		if printed.Deleted != count || printed.More != more {
			return 0, fmt.Errorf("deleted %d, more %v; want %d, %v", printed.Deleted, printed.More, count, more)
		}
		return printed.Epoch, nil
	}}
}

// wantValue checks that one line of output has a value.
func wantValue(value string) func(out string) (uint64, error) {
	return func(out string) (uint64, error) {
		var printed chainValue
		if err := json.Unmarshal([]byte(out), &printed); err != nil {
			return 0, err
		}
		if printed.Value != value {
			return 0, fmt.Errorf("the value is %s, want %s", printed.Value, value)
		}
		return printed.Epoch, nil
	}
}

// kept is a value in the place of another one: an operation keeps deadline and lease.
func (v chainValue) kept(value string) chainValue {
	v.Value, v.Epoch = value, 0
	return v
}

func (c *chain) invoke() *chainWrite {
	key := c.known()
	v, exists := c.now[key]
	switch c.rng.IntN(4) {
	case 0:
		old, value := c.value(), c.value()
		if exists && c.rng.IntN(4) > 0 {
			old = v.Value
		}
		w := &chainWrite{args: []string{"cas", key, old, value}, check: wantValue(value), after: c.with(func(s chainState) { s[key] = v.kept(value) })}
		if !exists || old != v.Value {
			w.code = 4
		}
		return w
	case 1:
		if exists {
			return &chainWrite{args: []string{"touch", key, "--ttl", "3h"}, after: c.with(func(s chainState) {
				v := v.kept(v.Value)
				v.Expires = 1
				s[key] = v
			})}
		}
	case 2:
		w := &chainWrite{args: []string{"persist", key}, after: c.with(func(s chainState) {
			v := v.kept(v.Value)
			v.Expires = 0
			s[key] = v
		})}
		if v.Expires == 0 {
			w.code = 4
		}
		return w
	}
	old, _ := strconv.Atoi(cmp.Or(v.Value, "0"))
	delta := c.rng.IntN(100)
	sum := strconv.Itoa(old + delta)
	return &chainWrite{args: []string{"incr", key, fmt.Sprint(delta)}, check: wantValue(sum), after: c.with(func(s chainState) { s[key] = v.kept(sum) })}
}

// script is a transaction.
func (c *chain) script() *chainWrite {
	w := &chainWrite{args: []string{"txn", "-", "--retries", "3"}, after: maps.Clone(c.now)}
	type printed struct {
		Key   string `json:"key"`
		Value string `json:"value"`
		Found *bool  `json:"found"`
		Epoch uint64 `json:"epoch"`
	}
	var want []printed
	var script strings.Builder
	var saved chainState
	wrote, savedWrote := false, false
	say := func(format string, args ...any) { fmt.Fprintf(&script, format+"\n", args...) }
	for range 1 + c.rng.IntN(8) {
		key := c.known()
		v, exists := w.after[key]
		switch c.rng.IntN(7) {
		case 0, 1:
			value := c.value()
			say("put %s %q # a comment", key, value)
			w.after[key], wrote = chainValue{Value: value}, true
		case 2:
			say("del '%s'", key)
			delete(w.after, key)
			wrote = true
		case 3:
			say("get %s", key)
			p := printed{Key: key, Value: v.Value}
			if !exists {
				p.Found = new(bool)
			}
			want = append(want, p)
		case 4:
			old, _ := strconv.Atoi(cmp.Or(v.Value, "0"))
			say("incr %s 3", key)
			sum := strconv.Itoa(old + 3)
			w.after[key], wrote = v.kept(sum), true
			want = append(want, printed{Key: key, Value: sum})
		case 5:
			say("delrange %s %s", key[:2], key)
			for k := range w.after {
				if k >= key[:2] && k < key {
					delete(w.after, k)
					wrote = true
				}
			}
		case 6:
			if saved == nil {
				say("savepoint s")
				saved, savedWrote = maps.Clone(w.after), wrote
			} else {
				say("rollback to s")
				w.after, wrote = maps.Clone(saved), savedWrote
			}
		}
	}
	if c.rng.IntN(6) == 0 {
		say("rollback")
		w.after, wrote = c.now, false
	} else if c.rng.IntN(2) == 0 {
		say("commit")
	}
	w.stdin = script.String()
	w.check = func(out string) (epoch uint64, err error) {
		var got []printed
		for line := range strings.Lines(out) {
			var p printed
			if err := json.Unmarshal([]byte(line), &p); err != nil {
				return 0, err
			}
			if p.Key == "" {
				epoch = p.Epoch
				continue
			}
			got = append(got, p)
		}
		same := slices.EqualFunc(got, want, func(x, y printed) bool {
			return x.Key == y.Key && x.Value == y.Value && (x.Found == nil) == (y.Found == nil)
		})
		if !same {
			return 0, fmt.Errorf("printed %+v, want %+v", got, want)
		}
		if !wrote && epoch != 0 {
			w.after = c.now // deletions of what did not exist, or what was undone, may still make a commit
		}
		return epoch, nil
	}
	return w
}

// restoreKey gives a key the value that it had.
func (c *chain) restoreKey() *chainWrite {
	if len(c.past) == 0 {
		return c.put()
	}
	key, then := c.known(), c.past[c.rng.IntN(len(c.past))]
	old, existed := then.state[key]
	v, exists := c.now[key]
	return &chainWrite{args: []string{"restore-key", key, "--at", fmt.Sprint(then.epoch)}, after: c.with(func(s chainState) {
		switch {
		case existed == exists && old.Epoch == v.Epoch:
		case existed:
			s[key] = chainValue{Value: old.Value}
		default:
			delete(s, key)
		}
	})}
}

// imported is an import, in batches.
func (c *chain) imported() *chainWrite {
	w := &chainWrite{args: []string{"import", "-", "--batch", "2"}, loose: true, values: map[string][]string{}, after: maps.Clone(c.now)}
	for range 1 + c.rng.IntN(12) {
		key, value := c.key(), c.value()
		w.stdin += fmt.Sprintf("{\"key\":%q,\"value\":%q}\n", key, value)
		w.values[key] = append(w.values[key], value)
		w.after[key] = chainValue{Value: value}
	}
	w.check = func(string) (uint64, error) {
		got := c.stored()
		if !alike(got, w.after) {
			return 0, fmt.Errorf("the store has %v, want %v", got, w.after)
		}
		w.after = got
		return c.visible(), nil
	}
	return w
}

// locked is a fenced put of a command that holds a lock. It fails as the put does.
func (c *chain) locked() *chainWrite {
	key, value := c.known(), c.value()
	return &chainWrite{
		args:  []string{"lock", "the lock", "--ttl", "2s", "--", "sh", "-c", `exec kvctl put "$0" "$1" --fence "$KVCTL_LOCK_NAME=$KVCTL_LOCK_TOKEN" -o jsonl`, key, value},
		after: c.with(func(s chainState) { s[key] = chainValue{Value: value} }),
		loose: true, // the lock may be lost
	}
}
