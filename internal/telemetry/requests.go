package telemetry

import (
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
)

// Method is a kind of request. A request counts under its own method, both as a unary call and in a
// pipeline.
type Method uint8

// Methods.
const (
	MethodGet Method = iota
	MethodPut
	MethodDelete
	MethodBatchGet
	MethodBatchWrite
	MethodDeleteRange
	MethodScan
	MethodInvoke
	MethodInvokeAll
	MethodExecute
	MethodCommit   // of an interactive transaction: from its commit request to the answer
	MethodTransact // a whole stream, from opening to end
	MethodPipeline // a whole stream, from opening to end
	MethodBulkLoad // a whole stream, from opening to end
	MethodStatus
	MethodVerify
	MethodCheckpoint
	MethodResizeCache
	MethodSpace
	MethodGetOutcome
	MethodFinalizeUpgrade
	MethodClock
	MethodReloadTLS
	MethodSetConfig
	MethodReloadConfig
	MethodSlowRequests
	MethodGrantLease
	MethodRevokeLease
	MethodKeepAlive // a whole stream, from opening to end
	MethodGetLease
	MethodListLeases
	MethodAcquireLock // with the time that it waits
	MethodReleaseLock
	MethodGetLock
	MethodObserveLock // a whole stream, from opening to end
	MethodListLocks
	MethodWatch // a whole stream, from opening to end
	MethodHistory
	MethodDiff
	MethodListHolds
	MethodTakeHold
	MethodEndHold
	MethodCreateBackup // a whole stream, from opening to end
	MethodGetBackupStatus
	MethodListBackups
	MethodVerifyBackup // a whole stream, from opening to end
	MethodPruneBackups
	MethodArchiveStatus
	MethodGetStream // a whole stream, from opening to end
	MethodLogin
	MethodLogout
	MethodBootstrap
	MethodWhoAmI
	MethodEnable
	MethodDisable
	MethodExplain
	MethodCreateUser
	MethodUpdateUser
	MethodDeleteUser
	MethodListUsers
	MethodSetPassword
	MethodCreateRole
	MethodUpdateRole
	MethodDeleteRole
	MethodListRoles
	MethodCreateToken
	MethodListTokens
	MethodRevokeToken
	methodCount
)

var methodNames = [methodCount]string{
	"Get", "Put", "Delete", "BatchGet", "BatchWrite", "DeleteRange", "Scan",
	"Invoke", "InvokeAll", "Execute", "Commit", "Transact", "Pipeline", "BulkLoad", "Status",
	"Verify", "Checkpoint", "ResizeCache", "Space", "GetOutcome", "FinalizeUpgrade", "Clock", "ReloadTLS", "SetConfig", "ReloadConfig", "SlowRequests",
	"GrantLease", "RevokeLease", "KeepAlive", "GetLease", "ListLeases", "AcquireLock", "ReleaseLock", "GetLock", "ObserveLock", "ListLocks", "Watch",
	"History", "Diff", "ListHolds", "TakeHold", "EndHold", "CreateBackup", "GetBackupStatus", "ListBackups", "VerifyBackup", "PruneBackups", "ArchiveStatus", "GetStream",
	"Login", "Logout", "Bootstrap", "WhoAmI", "Enable", "Disable", "Explain", "CreateUser", "UpdateUser", "DeleteUser", "ListUsers", "SetPassword", "CreateRole", "UpdateRole", "DeleteRole", "ListRoles", "CreateToken", "ListTokens", "RevokeToken",
}

// String is the method's name on the wire.
func (m Method) String() string { return methodNames[m] }

// MethodNamed is the method with a name on the wire.
func MethodNamed(name string) (Method, bool) {
	i := slices.Index(methodNames[:], name)
	return Method(max(i, 0)), i >= 0
}

const (
	codeCount = int(codes.Unauthenticated) + 1

	// Bucket i has durations below 2^(bucketShift+i) ns: 4 us, 8 us, ... 8.6 s. With powers of two
	// the bucket is one instruction, and operators need no finer steps.
	bucketShift = 12
	bucketCount = 22 // with an upper bound; one more has the rest

	// shardCount: concurrent requests should not add to the same cache line; a scrape sums the
	// shards.
	shardCount = 16
)

// Requests counts requests by method and code, and their durations.
type Requests struct {
	next   atomic.Uint32
	shards [shardCount]Shard
}

// Shard is a share of the counters. A connection takes one and keeps it, so that adds rarely
// contend. Many goroutines may use it at once.
type Shard struct {
	methods [methodCount]methodCounters
	_       [128]byte // the next shard's first line is not fetched with this one's last
}

type methodCounters struct {
	codes    [codeCount]atomic.Uint64
	buckets  [bucketCount + 1]atomic.Uint64
	sumNanos atomic.Uint64
}

// Shard returns the shards in turn.
func (r *Requests) Shard() *Shard { return &r.shards[r.next.Add(1)%shardCount] }

// Observe counts one finished request.
func (s *Shard) Observe(m Method, code codes.Code, took time.Duration) {
	c := &s.methods[m]
	c.codes[min(int(code), codeCount-1)].Add(1)
	nanos := uint64(max(took, 0))
	c.buckets[min(bits.Len64(nanos>>bucketShift), bucketCount)].Add(1)
	c.sumNanos.Add(nanos)
}

var (
	requestsDesc = desc("requests_total", "Requests finished, by method and status code.", "method", "code")
	durationDesc = desc("request_duration_seconds",
		"Time from receiving a request to handing its answer to the transport.", "method")
)

type requestCollector struct{ requests *Requests }

func (c *requestCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- requestsDesc
	ch <- durationDesc
}

func (c *requestCollector) Collect(ch chan<- prometheus.Metric) {
	for m := range methodCount {
		var byCode [codeCount]uint64
		var byBucket [bucketCount + 1]uint64
		var nanos uint64
		for i := range c.requests.shards {
			s := &c.requests.shards[i].methods[m]
			for k := range s.codes {
				byCode[k] += s.codes[k].Load()
			}
			for k := range s.buckets {
				byBucket[k] += s.buckets[k].Load()
			}
			nanos += s.sumNanos.Load()
		}
		for code, n := range byCode {
			counter(ch, requestsDesc, float64(n), m.String(), codes.Code(code).String())
		}
		durationHistogram(ch, durationDesc, &byBucket, nanos, m.String())
	}
}

func durationHistogram(ch chan<- prometheus.Metric, d *prometheus.Desc, byBucket *[bucketCount + 1]uint64, sumNanos uint64, labels ...string) {
	bound := func(i int) float64 { return time.Duration(1 << (bucketShift + i)).Seconds() }
	histogram(ch, d, byBucket[:], time.Duration(sumNanos).Seconds(), bound, labels...)
}
