package mvcc

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
)

// TestLimitsOfClientsKeepNoKeyFromExpiring: a commit of the expirer deletes more keys than one of a client may.
func TestLimitsOfClientsKeepNoKeyFromExpiring(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := atLeisure()
		o.Limits.BatchBytes, o.Limits.BatchOps = 1<<10, 10
		s := mustOpen(t, o)
		x := mustSession(t, s)
		defer x.Close()
		deadline := in(s, time.Second)
		for i := range 2 * expiryBatchMax {
			putWith(t, x, fmt.Sprintf("a key of some bytes %d", i), "v", metadata.Fields{ExpiresAt: deadline})
		}
		time.Sleep(5 * time.Second)
		if st := s.Stats().Expiry; st.Err != nil || st.Expired != 2*expiryBatchMax || len(dump(t, s)) != 0 {
			t.Errorf("%+v, and %d keys are left", st, len(dump(t, s)))
		}
	})
}
