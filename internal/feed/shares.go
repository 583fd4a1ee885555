package feed

import "time"

// shares divides Options.CatchUpBytesPerSecond among the clients for whose watches the log is read: each has an equal share, and waits until what was read
// for it is paid for. One record may take a second. Without shares all others would wait for that, too, each time that they have read a little.
type shares struct {
	paid    map[string]time.Time // when what was read for a client is paid for; clients that have not read of late are not in it
	resting bool                 // a reader waits until a client may be read for again
}

const (
	// lateMax bounds the time that a reader makes up for after a timer was late.
	lateMax = 20 * time.Millisecond
	// restMax is how long a reader rests at a time: another client may have begun to wait.
	restMax = 20 * time.Millisecond
)

// owed is how long a client waits until the log is read for it again.
func (s *shares) owed(client string, now time.Time) time.Duration {
	return max(0, s.paid[client].Sub(now))
}

// charge charges bytes that were read for some clients, to each its part.
func (s *shares) charge(clients []string, bytes, perSecond int64, now time.Time) {
	earliest := now.Add(-lateMax)
	for client, at := range s.paid {
		if at.Before(earliest) {
			delete(s.paid, client)
		}
	}
	if bytes == 0 {
		return
	}
	if s.paid == nil {
		s.paid = map[string]time.Time{}
	}
	for _, client := range clients {
		if _, is := s.paid[client]; !is {
			s.paid[client] = earliest
		}
	}
	share := float64(perSecond) / float64(len(s.paid))
	cost := time.Duration(float64(bytes) / float64(len(clients)) / share * float64(time.Second))
	for _, client := range clients {
		s.paid[client] = s.paid[client].Add(cost)
	}
}
