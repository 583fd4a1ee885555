package storm

import (
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/lease"
)

// leases grants leases with the longest owners, a thousand at a time.
func (a *attacker) leases() {
	n := a.times(10_000, 400_000)
	a.bound += int64(n) * config.LeaseBytes
	grant := &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Hour), Owner: strings.Repeat("o", lease.OwnerBytesMax)}
	left := make(chan struct{}, n)
	for range n {
		left <- struct{}{}
	}
	close(left)
	var all sync.WaitGroup
	for range 20 {
		l := pb.NewLeaseServiceClient(a.dial())
		for range 50 {
			all.Go(func() {
				for range left {
					_, err := l.GrantLease(a.ctx, grant)
					if a.count("a lease", err); status.Code(err) != codes.OK && status.Code(err) != codes.ResourceExhausted {
						return
					}
				}
			})
		}
	}
	all.Wait()
}
