package peers

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/epochkv/epochkv/bench/harness"
)

const (
	singleKeys  = 1 // point: watches of one key each
	wholeRanges = 2 // point: watches of everything

	deliveredEvents = "events delivered"
	deliveryTimeout = 30 * time.Second
)

// delivery is a load of puts with watches that take what comes.
type delivery struct {
	rate    float64 // puts a second
	streams int
	all     bool // one watch of everything on each stream, instead of one watch for each record
}

// delivered measures how soon events arrive, and how many.
func delivered() harness.Scenario {
	const records = 1000
	// A rate of 5,000 puts would be 500,000 events a second at most, and never more than the bar.
	at := map[int]delivery{singleKeys: {rate: 20_000, streams: 10}, wholeRanges: {rate: 5250, streams: 100, all: true}}
	axis := harness.Axis{Name: "watches", Points: []int{singleKeys, wholeRanges}, Labels: []string{"1,000 of one key, 20,000 puts/s", "100 of all, 5,250 puts/s"}}
	s := scenario("watch-delivery", fmt.Sprintf("Events of %d records, all of them watched, while durable puts arrive at a fixed rate. Latencies are from before the put to the event.",
		records), "events", "", axis, nil, load{})
	s.Size, s.Weight = records, 8
	for _, k := range []kind{epochKVKind(), etcdKind()} {
		s.Arms = append(s.Arms, harness.Arm{Name: k.name, Run: func(r *harness.Run) error {
			return arm{k, load{callers: always(callersMany), inFlight: always(callersMany), run: at[r.Point].run}}.run(r)
		}})
	}
	s.Figures = []harness.Figure{
		{Arm: "epochkv", Points: []int{singleKeys}, Measure: harness.MeasureP99, AtMost: 5000, Source: "delivery p99 at most 5 ms, here with the put"},
		{Arm: "epochkv", Points: []int{wholeRanges}, AtLeast: 500_000, Source: "500,000 events/s in all"},
	}
	return s
}

// stampAt is where the value of a put has the time at which it was sent.
const stampAt = 16

// putStamped is putOwn whose value says when it was sent.
func putStamped(ctx context.Context, c *caller) error {
	i := c.own(len(c.order))
	version := c.records.versions[i].Load() + 1
	v := value(i, version)
	binary.BigEndian.PutUint64(v[stampAt:], uint64(time.Now().UnixNano()))
	if err := c.store.put(ctx, c.records.key(i), v); err != nil {
		return err
	}
	c.records.versions[i].Store(version)
	c.committed(i)
	return nil
}

func (d delivery) run(ctx context.Context, r *harness.Run, s *server, callers []*caller) (err error) {
	f, err := s.kind.feed(s, d.streams)
	if err != nil {
		return err
	}
	watching, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() { err = errors.Join(err, f.close()) }()
	receivers, err := d.open(watching, s, f)
	if err != nil {
		return err
	}
	var group errgroup.Group
	for _, one := range receivers {
		group.Go(func() error {
			err := one.run()
			if watching.Err() == nil {
				cancel(err) // nothing else would end the wait for its events
				return err
			}
			return nil
		})
	}
	err = byServer(r, s)(func() (int, error) { return d.put(watching, r, callers, receivers) })
	err = errors.Join(err, context.Cause(watching))
	cancel(nil)
	if err = errors.Join(err, group.Wait()); err != nil {
		return err
	}
	return summarizeDelivery(r, receivers, commits(callers)*d.copies())
}

// copies is how many watches each put has.
func (d delivery) copies() int {
	if d.all {
		return d.streams
	}
	return 1
}

// put makes the load, and waits until the last of its events has come.
func (d delivery) put(ctx context.Context, r *harness.Run, callers []*caller, receivers []*receiver) (int, error) {
	puts, late, err := harness.OpenLoop(d.rate, r.Window, len(callers), func(c int) error { return putStamped(ctx, callers[c]) })
	if err != nil {
		return 0, err
	}
	r.Lateness(late)
	r.Count("put p99 ms", harness.Percentile(99, puts...).Seconds()*1e3)
	want := commits(callers) * d.copies()
	deadline := time.Now().Add(deliveryTimeout)
	for received(receivers) < want {
		if err := sleep(ctx, time.Millisecond); err != nil {
			return 0, err
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("%d of %d events came within %v", received(receivers), want, deliveryTimeout)
		}
	}
	return want, nil
}

func (d delivery) open(ctx context.Context, s *server, f feed) (all []*receiver, err error) {
	for n := range d.streams {
		var keys [][]byte
		for i := n; i < len(s.order) && !d.all; i += d.streams {
			keys = append(keys, s.records.key(i))
		}
		stream, err := f.watch(ctx, keys)
		if err != nil {
			return nil, err
		}
		one := &receiver{
			changes: stream, records: s.records, newest: make([]uint64, len(s.order)),
			sincePut: harness.NewRecorder(), sinceCommit: harness.NewRecorder(),
		}
		for i := range one.newest {
			one.newest[i] = s.records.versions[i].Load()
		}
		all = append(all, one)
	}
	return all, nil
}

// receiver takes the events of a stream. It belongs to one goroutine, but for the count.
type receiver struct {
	changes
	records *records
	newest  []uint64 // version of each record that came last, or was there before
	count   atomic.Int64

	sincePut, sinceCommit *harness.Recorder
}

func (c *receiver) run() error {
	for {
		if err := c.receive(c.take); err != nil {
			return err
		}
	}
}

// take checks an event: it is a whole value of its record, the next version after the last that came.
func (c *receiver) take(e change) error {
	now := time.Now()
	i := c.records.number(e.key)
	if i < 0 || i >= len(c.newest) || !bytes.Equal(e.key, c.records.key(i)) {
		return fmt.Errorf("an event of %x, which is no record", e.key)
	}
	version, err := check(i, e.value, c.newest[i]+1)
	if err != nil {
		return err
	}
	if version != c.newest[i]+1 {
		return fmt.Errorf("record %d: version %x came after %x", i, version, c.newest[i])
	}
	c.newest[i] = version
	c.sincePut.Record(now.Sub(time.Unix(0, int64(binary.BigEndian.Uint64(e.value[stampAt:])))))
	if !e.committed.IsZero() {
		c.sinceCommit.Record(now.Sub(e.committed))
	}
	c.count.Add(1)
	return nil
}

func received(all []*receiver) (n int) {
	for _, one := range all {
		n += int(one.count.Load())
	}
	return n
}

func summarizeDelivery(r *harness.Run, receivers []*receiver, want int) error {
	var sincePut, sinceCommit []*harness.Recorder
	for _, one := range receivers {
		sincePut, sinceCommit = append(sincePut, one.sincePut), append(sinceCommit, one.sinceCommit)
	}
	r.Latencies(sincePut...)
	if p99 := harness.Percentile(99, sinceCommit...); p99 > 0 {
		r.Count("commit to receive p50 ms", harness.Percentile(50, sinceCommit...).Seconds()*1e3)
		r.Count("commit to receive p99 ms", p99.Seconds()*1e3)
	}
	return r.Prove(deliveredEvents, float64(received(receivers)), float64(want), float64(want))
}
