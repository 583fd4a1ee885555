package feed

// turns shares the bandwidth of catching up among clients: the log is read next for the client for which the least was read. One record may take a second
// of it. A client that has such records read again and again has its next one only when as much was read for each other client that waits.
//
// A client that comes counts as much as the one that had the last turn: it owes nothing for the time before, and has saved nothing.
type turns struct {
	floor int64            // what was counted of the client that had the last turn: the least of all that waited
	read  map[string]int64 // bytes, of the clients that are above the floor
}

// of is how much counts as read for a client.
func (t *turns) of(client string) int64 { return max(t.read[client], t.floor) }

// begin is told whose turn it is.
func (t *turns) begin(client string) {
	floor := t.of(client)
	if floor == t.floor {
		return
	}
	t.floor = floor
	for client, bytes := range t.read {
		if bytes <= floor {
			delete(t.read, client)
		}
	}
}

// charge counts what was read for some clients at once, for each its part.
func (t *turns) charge(clients []string, bytes int64) {
	if bytes == 0 {
		return
	}
	if t.read == nil {
		t.read = map[string]int64{}
	}
	for _, client := range clients {
		t.read[client] = t.of(client) + (bytes+int64(len(clients))-1)/int64(len(clients))
	}
}
