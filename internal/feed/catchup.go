package feed

import (
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

const (
	// groupBytes is how much of the log a reader reads at a time, and how far apart the watches are for which it does so.
	groupBytes = 4 << 20
	// groupTime is how long it reads at a time. Requests may have to wait for a processor as long as that.
	groupTime = time.Millisecond
	// lateMax bounds the time that a reader makes up for after a timer was late.
	lateMax = 20 * time.Millisecond
	// nearEpochs is how many commits groupBytes of the log may have.
	nearEpochs = groupBytes / 32
	// offersMax bounds the offers of a commit to a watch during which the tailer and the consumers wait. A larger group is offered one commit.
	offersMax = 1024
	// takeoverMax is how many commits of the ring a group takes before other lagging watches have their turn.
	takeoverMax = 16 * 1024
	// createdMax is how many commits a new watch takes of the ring at once. With more it waits for a reader: clients have turns there, and they may create
	// watches as often as they like, while the tailer waits.
	createdMax = 64
)

// catchUp are the lagging watches that wait for a reader. A watch does not wait while its queue is more than half full, or
// when it has lost its queue and its consumer has not come since: no reader works for a client that takes nothing.
type catchUp struct {
	line    []place
	ticket  uint64
	busy    map[string]bool // clients for which a reader reads: each has one at most
	readers int             // goroutines
	free    time.Time       // when the bandwidth that was used is paid for

	// owed is what records that were read for clients have beyond groupBytes. A client that owes lets others pass until as much was
	// read at their turns: one that has such records read again and again has no more of the bandwidth than each other.
	owed map[string]int64
}

// place is a place in the line. It is void if the watch has another ticket.
type place struct {
	watch  *Watch
	ticket uint64
}

// group are lagging watches near each other, for which one reader reads the log once. A watch whose group is another one
// has left: because it has ended, or because its queue had no room. All others have been offered everything that was read.
type group struct {
	watches []*Watch
	clients []string
	passed  []string              // clients that owe, and let this group pass
	from    map[string]keys.Epoch // the first position of each client

	largest   int64 // bytes of the largest record that was read
	largestAt keys.Epoch
}

// joinLocked lets a lagging watch wait for a reader.
func (f *Feed) joinLocked(w *Watch) {
	u := &f.catchUp
	if w.state != StateLagging || w.inLine || w.group != nil {
		return
	}
	f.startLocked(f.source.Stable())
	u.ticket++
	w.inLine, w.ticket = true, u.ticket
	u.line = append(u.line, place{w, u.ticket})
	if u.readers < f.options.CatchUpReaders && !f.options.manual && !f.closed {
		u.readers++
		f.done.Go(f.runReader)
	}
}

// leaveLineLocked takes a watch out of the line.
func (f *Feed) leaveLineLocked(w *Watch) { w.inLine, w.ticket = false, 0 }

// runReader reads for lagging watches until none waits.
func (f *Feed) runReader() {
	var r reading
	defer r.close()
	for {
		f.lock()
		g := f.takeGroupLocked()
		if g == nil {
			f.catchUp.readers--
			f.unlock()
			return
		}
		f.unlock()
		sleep(f.ctx, f.throttle(f.serve(&r, g)))
	}
}

// throttle charges bytes to the bandwidth, and returns how long the reader has to wait.
func (f *Feed) throttle(bytes int64) time.Duration {
	f.lock()
	defer f.unlock()
	f.counters.catchUpBytes += uint64(bytes)
	u, now := &f.catchUp, time.Now()
	if earliest := now.Add(-lateMax); u.free.Before(earliest) {
		u.free = earliest
	}
	u.free = u.free.Add(time.Duration(float64(bytes) / float64(f.options.CatchUpBytesPerSecond) * float64(time.Second)))
	return u.free.Sub(now)
}

// takeGroupLocked takes the watch whose turn it is, and all for which the log that is read for that one should be read, too. It returns nil if there is
// none.
func (f *Feed) takeGroupLocked() *group {
	u := &f.catchUp
	first, passed := u.nextLocked()
	if first == nil {
		return nil
	}
	g := &group{passed: u.letPassLocked(passed), from: map[string]keys.Epoch{}}
	kept := u.line[:0]
	for _, p := range u.line {
		switch w := p.watch; {
		case w.ticket != p.ticket:
		case u.busy[w.consumer.client] || !u.comesAlongLocked(first, w):
			kept = append(kept, p)
		default:
			f.leaveLineLocked(w)
			w.group, g.watches = g, append(g.watches, w)
		}
	}
	clear(u.line[len(kept):])
	u.line = kept
	for _, w := range g.watches {
		client := w.consumer.client
		if !u.busy[client] {
			u.busy[client] = true
			g.clients = append(g.clients, client)
			g.from[client] = w.queued.Epoch
		}
		g.from[client] = min(g.from[client], w.queued.Epoch)
	}
	return g
}

// nextLocked is the first watch in the line of a client for which no reader reads and that owes nothing, and how many places it passes. If all owe, they
// owe less by what one of them owes, whose turn it is then; unless a reader reads for another client: then that reader looks again. It is nil if there is
// none.
func (u *catchUp) nextLocked() (first *Watch, passed int) {
	var of *Consumer // of the place before: many watches in a row have the same one
	var busy bool
	var owed, least int64
	for i, p := range u.line {
		w := p.watch
		if w.ticket != p.ticket {
			continue
		}
		if of != w.consumer {
			of = w.consumer
			busy, owed = u.busy[of.client], u.owed[of.client]
		}
		switch {
		case busy:
		case owed == 0:
			return w, i
		case first == nil || owed < least:
			first, least = w, owed
		}
	}
	if first == nil {
		u.line = slices.DeleteFunc(u.line, func(p place) bool { return p.watch.ticket != p.ticket })
	}
	if len(u.busy) > 0 {
		return nil, 0
	}
	for client := range u.owed {
		u.payLocked(client, least)
	}
	if first == nil {
		clear(u.owed) // no client waits
	}
	return first, 0
}

// letPassLocked puts the places that owe, among the first of the line, at its end, and returns the clients.
func (u *catchUp) letPassLocked(places int) (clients []string) {
	if len(u.owed) == 0 {
		return nil
	}
	var passed []place
	rest := u.line[:0]
	for i, p := range u.line {
		client := p.watch.consumer.client
		if i >= places || p.watch.ticket != p.ticket || u.busy[client] {
			rest = append(rest, p)
			continue
		}
		passed = append(passed, p)
		if !slices.Contains(clients, client) {
			clients = append(clients, client)
		}
	}
	u.line = append(rest, passed...)
	return clients
}

// chargeLocked counts what was read at a turn: the clients that let it pass owe less by that, and those that needed it owe what a record has beyond a
// usual turn.
func (u *catchUp) chargeLocked(g *group, bytes int64) {
	for _, client := range g.passed {
		u.payLocked(client, bytes)
	}
	if g.largest <= groupBytes {
		return
	}
	for _, client := range g.clients {
		if g.from[client] < g.largestAt {
			u.owed[client] += g.largest - groupBytes
		}
	}
}

func (u *catchUp) payLocked(client string, bytes int64) {
	if u.owed[client] -= bytes; u.owed[client] <= 0 {
		delete(u.owed, client)
	}
}

// comesAlongLocked reports whether the log that is read for one watch should be read for another, too. If that one is before it, something is read for
// it alone: not if its client owes, and not if it is not known where its position is in the log, which takes the reading of what is before it in its
// segment. Otherwise watches that begin again and again would let those with which they are read have nothing. A watch that its stream awaits waits for a
// turn that begins at its position: nothing before that is read, and the first record has what the stream waits for.
func (u *catchUp) comesAlongLocked(first, w *Watch) bool {
	switch {
	case w.isAwaitedLocked():
		return first.isAwaitedLocked() && w.queued.Epoch == first.queued.Epoch
	case first.isAwaitedLocked() && w.queued.Epoch < first.queued.Epoch:
		return false
	}
	bytes := bytesBetween(first, w)
	if bytes >= 0 {
		return bytes <= groupBytes
	}
	return -bytes <= groupBytes && u.owed[w.consumer.client] == 0 && (w.mark != (wal.TailMark{}) || first.mark == (wal.TailMark{}))
}

// bytesBetween is about how much the log has between the positions of two watches; negative if that of the second one is before that of the first.
func bytesBetween(a, b *Watch) int64 {
	if bytes, known := a.mark.BytesTo(b.mark); known {
		return bytes
	}
	const epochBytes = groupBytes / nearEpochs
	if b.queued.Epoch < a.queued.Epoch {
		return -epochBytes * int64(min(a.queued.Epoch-b.queued.Epoch, 2*nearEpochs))
	}
	return epochBytes * int64(min(b.queued.Epoch-a.queued.Epoch, 2*nearEpochs))
}

// serve reads the log for a group, lets those take over whose positions are in the ring, and returns how many bytes it read.
func (f *Feed) serve(r *reading, g *group) (bytes int64) {
	if start, mark, needed := f.startOf(g); needed {
		bytes = f.readFor(r, g, start, mark)
	}
	f.lock()
	defer f.unlock()
	f.takeOverLocked(g)
	for _, w := range g.watches {
		f.dismissLocked(w, g)
	}
	for _, client := range g.clients {
		delete(f.catchUp.busy, client)
	}
	f.catchUp.chargeLocked(g, bytes)
	return bytes
}

// dismissLocked lets a watch that is still in a group wait for a reader again.
func (f *Feed) dismissLocked(w *Watch, g *group) {
	if w.group != g {
		return
	}
	w.group = nil
	if w.halfEmpty() {
		f.joinLocked(w)
	}
}

// startOf is the first position of a group, unless all are in the ring.
func (f *Feed) startOf(g *group) (start Position, mark wal.TailMark, needed bool) {
	f.lock()
	defer f.unlock()
	start = Position{Epoch: f.ring.from}
	for _, w := range g.watches {
		if w.group == g && w.queued.Epoch < start.Epoch {
			start, mark, needed = w.queued, w.mark, true
		}
	}
	return start, mark, needed
}

// offerPieces offers pieces to a group. It reports false if no watch of the group can take more.
func (f *Feed) offerPieces(g *group, pieces []piece) (more bool) {
	f.lock()
	defer f.unlock()
	more = true
	for i, offers := 0, 0; more && i < len(pieces); i++ {
		p := &pieces[i]
		for j := range p.commits {
			offers += f.offerToGroupLocked(g, &p.commits[j], &p.at)
		}
		if last := i == len(pieces)-1; last || offers >= offersMax {
			more, offers = g.advanceLocked(p.through), 0
			f.yieldLocked(!last)
		}
	}
	clear(pieces)
	return more
}

// yieldLocked makes room, and lets the tailer, consumers and other readers go on if more follows.
func (f *Feed) yieldLocked(more bool) {
	f.makeRoomLocked()
	if more {
		f.unlock()
		f.lock()
	}
}

// offerToGroupLocked offers the next commit to the watches of a group that may want it, and returns their number. A watch whose queue
// has no room leaves the group: it comes again when its consumer has taken something. The mark, if any, is where the commit begins.
func (f *Feed) offerToGroupLocked(g *group, at **Commit, mark *wal.TailMark) (offers int) {
	c := *at
	watches := f.wantersLocked(g, c)
	for _, w := range watches {
		if w.group != g {
			continue
		}
		w.queued = latest(w.queued, Position{Epoch: c.before()})
		if f.offerLocked(w, at) {
			continue
		}
		if w.group = nil; mark != nil {
			w.mark = *mark
		}
	}
	return len(watches)
}

// wantersLocked are the watches of a group that may want something of a commit, and others. Those of a small group are asked one by
// one; so are those of a large one if the index has more watches for the commit than there are in the group.
func (f *Feed) wantersLocked(g *group, c *Commit) []*Watch {
	if n := len(g.watches); n >= f.options.indexedMin && c.Loaded == nil {
		if found, all := f.index.candidates(c, false, n); all {
			return found
		}
	}
	return g.watches
}

// advanceLocked says that everything up to an epoch was offered to the watches of a group, and reports whether it has any.
func (g *group) advanceLocked(through keys.Epoch) (has bool) {
	for _, w := range g.watches {
		if w.group == g {
			w.queued, w.failures, has = latest(w.queued, Position{Epoch: through}), 0, true
		}
	}
	return has
}

// markGroup records where the log was read to for those that got all of it.
func (f *Feed) markGroup(g *group, at keys.Epoch, mark wal.TailMark) {
	f.lock()
	defer f.unlock()
	for _, w := range g.watches {
		if w.group == g && w.queued.Epoch+1 == at {
			w.mark = mark
		}
	}
}

// gapFor tells the watches of a group that the log does not have what comes next. The others find out when it is their turn.
func (f *Feed) gapFor(g *group, at keys.Epoch, err error) {
	f.lock()
	failures := 0
	for _, w := range g.watches {
		if w.group == g && w.queued.Epoch+1 == at {
			w.failures++
			failures = max(failures, w.failures)
		}
	}
	f.unlock()
	gap, ok := f.gapAt(f.ctx, at, err, failures)
	if !ok {
		sleep(f.ctx, retryEvery)
		return
	}
	f.lock()
	defer f.unlock()
	for _, w := range g.watches {
		if w.group == g && (w.queued.Epoch+1 == at || gap.Cause == nil && w.queued.Epoch < gap.ResumeAt) {
			f.gapLocked(w, gap)
		}
	}
}

// takeOverLocked lets the watches of a group take what the ring has after their positions. Those that could take all of it are
// live: the tailer offers them the next commit. The tailer waits meanwhile, but for short parts of the ring only.
func (f *Feed) takeOverLocked(g *group) {
	for taken := 0; taken < takeoverMax && f.tailer != nil; {
		from, found := f.inRingLocked(g)
		if !found {
			return
		}
		commits, n := f.ring.after(from), 0
		for offers := 0; n < len(commits) && n < offersMax && offers < offersMax; n++ {
			offers += f.offerToGroupLocked(g, &commits[n], nil)
		}
		if taken += n; n == len(commits) {
			f.joinTailerLocked(g)
			return
		}
		g.advanceLocked(commits[n-1].Epoch)
		f.yieldLocked(true)
	}
}

// inRingLocked dismisses the watches of a group of which the ring does not have the next commits, and returns the first position of
// the others.
func (f *Feed) inRingLocked(g *group) (from keys.Epoch, found bool) {
	from = keys.MaxEpoch
	for _, w := range g.watches {
		if w.queued.Epoch < f.ring.from {
			f.dismissLocked(w, g)
		} else if w.group == g {
			from, found = min(from, w.queued.Epoch), true
		}
	}
	return from, found
}

// joinTailerLocked makes the watches of a group live, which have everything up to the last dispatched commit.
func (f *Feed) joinTailerLocked(g *group) {
	g.advanceLocked(f.ring.dispatched)
	for _, w := range g.watches {
		if w.group == g {
			w.group, w.state = nil, StateLive
			f.live++
			f.index.promote(w)
		}
	}
}
