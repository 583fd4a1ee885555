package config

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"
)

// SlowRequests says which requests are reported as slow, and what is kept of them.
type SlowRequests struct {
	Threshold time.Duration // from which a request is slow; 0: none is
	Entries   int           // most that are kept, the slowest of the last hour
	Size      Size          // most memory for them
	KeyBytes  int           // of the first key, that are kept and shown; 0: none
}

// SlowKeyBytesMax bounds what is kept of a key: each request in flight has room for it.
const SlowKeyBytesMax = 16

const (
	slowThresholdMin = 100 * time.Microsecond // below, every put on a fast disk is reported
	slowEntriesMax   = 10_000                 // a report of more is not read
	slowSizeMin      = 4 * KiB                // a few entries
)

func (s *SlowRequests) flags(f *pflag.FlagSet) {
	f.DurationVar(&s.Threshold, "slow-request-threshold", s.Threshold, "a request that takes longer is kept for kvctl slow, and logged at most once a minute for each method; 0 is never")
	f.IntVar(&s.Entries, "slow-requests", s.Entries, "most slow requests that are kept: the slowest of the last hour")
	f.Var(&s.Size, "slow-requests-size", "most memory for them")
	f.IntVar(&s.KeyBytes, "slow-request-key-bytes", s.KeyBytes, fmt.Sprintf("how many bytes of a slow request's first key are kept and shown, at most %d; 0 keeps nothing of keys", SlowKeyBytesMax))
}

func (s *SlowRequests) validate(v *validation) {
	if s.Threshold != 0 {
		v.duration("slow-request-threshold", s.Threshold, slowThresholdMin, time.Hour)
	}
	v.check(s.Entries >= 1 && s.Entries <= slowEntriesMax, "slow-requests", fmt.Sprintf("is %d; choose between 1 and %d", s.Entries, slowEntriesMax))
	v.size("slow-requests-size", s.Size, slowSizeMin, GiB)
	v.check(s.KeyBytes >= 0 && s.KeyBytes <= SlowKeyBytesMax, "slow-request-key-bytes",
		fmt.Sprintf("is %d; choose between 0 and %d", s.KeyBytes, SlowKeyBytesMax))
}
