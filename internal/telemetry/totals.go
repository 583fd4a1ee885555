package telemetry

import "google.golang.org/grpc/codes"

// Totals are sums over requests since the start.
type Totals struct {
	Count, Failed uint64 // Failed: with another code than OK
	// Latency counts requests by duration: bucket i has those below 2^(12+i) ns, the last one the rest.
	Latency [bucketCount + 1]uint64
}

// Methods are all methods.
func Methods() []Method {
	all := make([]Method, methodCount)
	for i := range all {
		all[i] = Method(i)
	}
	return all
}

// Totals sums up the requests of some methods. It reads counters that other goroutines change, so sums of different
// fields may differ by requests that end meanwhile.
func (r *Requests) Totals(methods ...Method) (t Totals) {
	for i := range r.shards {
		for _, m := range methods {
			c := &r.shards[i].methods[m]
			for code := range c.codes {
				n := c.codes[code].Load()
				t.Count += n
				if codes.Code(code) != codes.OK {
					t.Failed += n
				}
			}
			for k := range c.buckets {
				t.Latency[k] += c.buckets[k].Load()
			}
		}
	}
	return t
}
