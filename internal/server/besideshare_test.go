package server

import (
	"bytes"
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
)

// withTransports runs a test with each of the transports.
func withTransports(t *testing.T, test func(t *testing.T, with func(*config.Config))) {
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) { test(t, func(c *config.Config) { c.Transport = transport }) })
	}
}

// putOf begins a put of a message of so many bytes, of which little comes.
func (c *rawClient) putOf(stream uint32, bytes int64) {
	c.begin(stream, methodPut, "120S")
	c.send(frame(frameData, 0, stream, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(bytes)), make([]byte, 3000)...)))
}

// TestAHalfSentMessageKeepsNoOthersOut: one of the greatest length has the place beside the share, so that only another as large is refused.
func TestAHalfSentMessageKeepsNoOthersOut(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		put := func(size int64) error {
			_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: make([]byte, size), Durability: pb.Durability_DURABILITY_ASYNC})
			return err
		}
		c := h.dialRaw(t)
		c.putOf(1, int64(messageBytesMax(&h.config)))
		eventually(t, "it has the place", func() bool { return h.receiving.beside.bytes() > 0 })
		for _, size := range []int64{receivedBytesMin, 1 << 20, h.receiving.large.limit/2 - 1<<10} {
			if err := put(size); err != nil {
				t.Errorf("%d bytes beside a half-sent message: %v", size, err)
			}
		}
		large := h.receiving.large.limit/2 + 1
		failureOf(t, put(large)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the place is free", func() bool { return h.receiving.beside.bytes() == 0 })
		if err := put(large); err != nil {
			t.Errorf("after it: %v", err)
		}
	})
}

// TestThePlaceOfALargeMessageIsTakenInTurns: one that comes later than another, which was refused, is refused while the place is kept for that.
func TestThePlaceOfALargeMessageIsTakenInTurns(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		size := h.receiving.large.limit/2 + 1
		first, two, three := h.dialRaw(t), h.dialRaw(t), h.dialRaw(t)
		first.putOf(1, size)
		eventually(t, "it has the place", func() bool { return h.receiving.beside.bytes() > 0 })
		time.Sleep(claimTimeMax)
		two.putOf(1, size)
		if got := two.reasonOf(t, 1); got != "OVERLOADED" {
			t.Errorf("the place has two messages: %q", got)
		}
		began := time.Now()
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the place is free", func() bool { return h.receiving.beside.bytes() == 0 })
		three.putOf(1, size)
		if got := three.reasonOf(t, 1); got != "OVERLOADED" && time.Since(began) < claimTimeMax {
			t.Errorf("one that comes later: %q", got)
		}
		two.putOf(3, size)
		eventually(t, "it has the place", func() bool { return h.receiving.beside.bytes() > 0 })
	})
}

// TestHalfSentMessagesLeaveRoom: the first message of a connection leaves as much free as it takes, too, or has the place beside the share.
func TestHalfSentMessagesLeaveRoom(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		one, two, half := h.dialRaw(t), h.dialRaw(t), h.receiving.large.limit/2
		one.putOf(1, half)
		eventually(t, "it is being received", func() bool { return h.receiving.reserved() == half })
		two.putOf(1, half)
		eventually(t, "it has the place", func() bool { return h.receiving.beside.bytes() == half && h.receiving.reserved() == half })
		three := h.dialRawFrom(t, clientAddress())
		three.putOf(1, half)
		if got := three.reasonOf(t, 1); got != "OVERLOADED" {
			t.Errorf("the other half: %q", got)
		}
		three.putOf(3, half/2)
		eventually(t, "it is being received", func() bool { return h.receiving.reserved() == half+half/2 })
		put := &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 1<<20), Durability: pb.Durability_DURABILITY_ASYNC}
		if _, err := pb.NewKVServiceClient(h.dialClient(t)).Put(testContext(t), put); err != nil {
			t.Errorf("a message of another client: %v", err)
		}
	})
}

// TestALargeMessageIsReceivedBesideAFullShare: a few connections that always have as much as they may leave a part free in which what is large for
// the share never fits. It takes the place beside, and leaves it; what is small for the share does not.
func TestALargeMessageIsReceivedBesideAFullShare(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		r := &h.receiving
		var full []*rawClient
		for has := int64(0); ; {
			c := h.dialRawFrom(t, clientAddress()) // of one client they leave a quarter
			more := (r.large.limit - has) / 2
			if more < r.large.limit/largePart {
				break
			}
			c.putOf(1, more)
			has += more
			eventually(t, "it is being received", func() bool { return r.large.reserved.Load() == has })
			full = append(full, c)
		}
		free := r.large.limit - r.large.reserved.Load()
		put := func(size int64) error {
			_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: make([]byte, size), Durability: pb.Durability_DURABILITY_ASYNC})
			return err
		}
		for range 3 {
			if err := put(free); err != nil {
				t.Errorf("%d bytes beside a full share: %v", free, err)
			}
		}
		small := r.large.limit / largePart / 2
		one := h.dialRaw(t)
		one.putOf(1, free)
		eventually(t, "it has the place", func() bool { return r.beside.bytes() == free })
		failureOf(t, put(free)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
		if err := put(small); err != nil {
			t.Errorf("%d bytes: %v", small, err)
		}
		if err := one.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the place is free", func() bool { return r.beside.bytes() == 0 })
		for _, c := range full {
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "all is released", func() bool { return r.reserved() == 0 && r.beside.bytes() == 0 })
	})
}

// TestALargeMessageMustComeFaster: while another wants its place, each of four parts must come within --message-timeout. Of other messages a
// little must.
func TestALargeMessageMustComeFaster(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		const timeout = 2 * time.Second
		h := mustStart(t, with, func(c *config.Config) { c.MessageTimeout = timeout })
		large := 4*slotParts*progressBytes + h.receiving.large.limit/2
		sends := func(t *testing.T, length int64, wanted bool) (reason string, took time.Duration) { // what is asked for of others, twice in the time
			began, c := time.Now(), h.dialRaw(t)
			c.putOf(1, length)
			if wanted {
				eventually(t, "it has the place", func() bool { return h.receiving.beside.bytes() > 0 })
				other := h.dialRaw(t)
				if other.putOf(1, large); other.reasonOf(t, 1) != "OVERLOADED" {
					t.Error("the place has two messages")
				}
			}
			stop, stopped := make(chan struct{}), make(chan struct{})
			defer func() { <-stopped }()
			defer close(stop)
			go func() {
				defer close(stopped)
				part := frame(frameData, 0, 1, make([]byte, 16<<10))
				for range 3 * progressBytes >> 14 {
					for range 2 {
						if _, err := c.Write(part); err != nil {
							return
						}
					}
					select {
					case <-stop:
						return
					case <-time.After(timeout / (progressBytes >> 14)):
					}
				}
			}()
			_ = c.SetReadDeadline(time.Now().Add(patience))
			reason = c.reasonOf(t, 1)
			return reason, time.Since(began)
		}
		for _, c := range []struct {
			name     string
			length   int64
			wanted   bool
			min, max time.Duration // it comes for three times the timeout
		}{
			{"a large one for which another was refused", large, true, 0, 2 * timeout},
			{"a large one that is in no other's way", large, false, 3 * timeout, patience},
			{"one in the share", h.receiving.large.limit / 2, false, 3 * timeout, patience},
		} {
			t.Run(c.name, func(t *testing.T) {
				if !c.wanted {
					t.Parallel() // one that is not in the share, and one that is
				}
				if reason, took := sends(t, c.length, c.wanted); reason != "MESSAGE_INCOMPLETE" || took < c.min || took > c.max {
					t.Errorf("ended after %v: %q", took, reason)
				}
			})
		}
	})
}

// deafWatch is a client of a watch from an epoch on that takes nothing by itself.
func (h *harness) deafWatch(t *testing.T, prefix string, after uint64) *rawClient {
	t.Helper()
	c := h.dialRaw(t)
	create, err := proto.Marshal(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{
		Ranges: []*pb.KeyRange{prefixRange(prefix)}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: after},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	c.begin(1, pb.FeedService_Watch_FullMethodName, "120S")
	c.send(frame(frameData, 0, 1, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(create))), create...)))
	return c
}

// TestWatchesThatTakeNothingKeepNoSmallerResponsesWaiting: the largest one has the place beside the share, and others leave room in it.
func TestWatchesThatTakeNothingKeepNoSmallerResponsesWaiting(t *testing.T) {
	testseed.SkipUnderRace(t)
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		share := int(h.admission.words[shareWatches].limit.bytes)
		e := h.put(t, "large", string(make([]byte, 16<<20)))
		h.put(t, "half", string(make([]byte, share/2-1<<10)))
		for i, prefix := range []string{"large", "large", "half", "half"} {
			h.deafWatch(t, prefix, e-1)
			eventually(t, "it has room, or waits", func() bool {
				l := &h.admission.watches
				l.mu.Lock()
				defer l.mu.Unlock()
				return len(l.waiting) == i/2+i%2 && l.beside.bytes() > 0
			})
		}
		w := mustWatch(t, h, &pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("k")}})
		w.recv()
		for range 3 {
			h.put(t, "k", string(make([]byte, 400<<10)))
			if got := w.recv().GetChanges().GetCommits(); len(got) != 1 || len(got[0].Events[0].Value) != 400<<10 {
				t.Fatal("the operation has not come")
			}
		}
		if n := h.feed.streams.Load(); n != 5 {
			t.Errorf("%d streams are left", n)
		}
	})
}

// commitInStore puts a value without a message, which a short --message-timeout could end.
func (h *harness) commitInStore(t *testing.T, key string, value []byte) uint64 {
	t.Helper()
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	var w mvcc.Write
	w.Set([]byte(key), value)
	e, err := x.Commit(testContext(t), &w)
	if err == nil {
		err = h.store.Wait(testContext(t), e, mvcc.DurabilitySync)
	}
	if err != nil {
		t.Fatal(err)
	}
	return uint64(e)
}

// TestAWatchThatTakesItsResponseSlowlyEnds while others wait for its room: after four times --message-timeout, although it takes something all the time.
func TestAWatchThatTakesItsResponseSlowlyEnds(t *testing.T) {
	const timeout = 2 * time.Second
	h := mustStart(t, withDirect, func(c *config.Config) { c.MessageTimeout = timeout })
	e := h.commitInStore(t, "large", make([]byte, 16<<20))
	slow := h.deafWatch(t, "large", e-1)
	began := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	defer func() { <-stopped }()
	defer close(stop)
	go func() { // takes as much as it must, for a minute if it may
		defer close(stopped)
		more := bytes.Join([][]byte{windowOf(0, 2*sentStep), windowOf(1, 2*sentStep)}, nil)
		for {
			select {
			case <-stop:
				return
			case <-time.After(timeout / 4):
			}
			if _, err := slow.Write(more); err != nil {
				return
			}
		}
	}()
	eventually(t, "it has the place", func() bool { return h.admission.watches.beside.bytes() > 0 })
	w := mustWatch(t, h, &pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("large")}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}})
	w.recv()
	if got := w.recv().GetChanges().GetCommits(); len(got) != 1 {
		t.Fatal("the operation has not come")
	}
	if took := time.Since(began); took < 3*timeout {
		t.Errorf("another had the place after %v", took)
	}
	if got := slow.reasonOf(t, 1); got != "reset: CANCEL" { // it goes on too slowly for the reason to come after the rest
		t.Errorf("the slow one ended with %q", got)
	}
}

// TestASlowWatchEndsSoonerWhileMoreConnectionsWait, though the client takes something all the time.
func TestASlowWatchEndsSoonerWhileMoreConnectionsWait(t *testing.T) {
	const timeout = 12 * time.Second
	for others, want := range []time.Duration{0, 4 * timeout, 2 * timeout, 4 * timeout / 3, timeout, timeout} {
		synctest.Test(t, func(t *testing.T) {
			s := &Server{clock: clock{started: time.Now()}, configuration: configuration{config: config.Config{MessageTimeout: timeout}}}
			s.config.Feed.StallTimeout = time.Hour
			s.admission.slotTime = slotParts * timeout
			w := &watchStream{server: s}
			w.turn.holds.Store(true)
			time.Sleep(time.Nanosecond) // zero is no time
			begun := s.clock.now()
			w.turn.since.Store(int64(begun))
			for range others {
				s.admission.watches.waiting = append(s.admission.watches.waiting, &watchRoom{conn: new(connection)})
			}
			for ended := time.Duration(0); ended < 5*timeout; ended = s.clock.now() - begun {
				w.sending.Store(int64(s.clock.now()))
				err := w.stalled()
				if is := want > 0 && ended >= want; (err != nil) != is {
					t.Fatalf("%d others: after %v: %v", others, ended, err)
				}
				time.Sleep(timeout / 12)
			}
		})
	}
}

// TestAStalledWatchKeepsRoomFromOthersNoLonger: a request that its sender does not take has room for which others wait, and its client takes nothing.
func TestAStalledWatchKeepsRoomFromOthersNoLonger(t *testing.T) {
	const timeout = 12 * time.Second
	synctest.Test(t, func(t *testing.T) {
		s := &Server{clock: clock{started: time.Now()}, configuration: configuration{config: config.Config{MessageTimeout: timeout}}}
		s.config.Feed.StallTimeout = time.Hour
		w := &watchStream{server: s}
		time.Sleep(time.Nanosecond) // zero is no time
		w.sending.Store(int64(s.clock.now()))
		time.Sleep(timeout)
		for _, c := range []struct{ room, others, ends bool }{{false, true, false}, {true, false, false}, {true, true, true}} {
			w.turn.request.Store(c.room)
			s.admission.watches.waiting = nil
			if c.others {
				s.admission.watches.waiting = []*watchRoom{{conn: new(connection)}}
			}
			if err := w.stalled(); (err != nil) != c.ends {
				t.Errorf("%+v: %v", c, err)
			}
		}
	})
}
