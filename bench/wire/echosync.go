package wire

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Bytes that the store's log has beside keys and values: the header of a record and of its body, and of each operation its kind, key
// space and lengths.
const (
	recordOverhead    = 24 + 8
	operationOverhead = 4
)

// groupCommitBytesMax is the size of the file of a group commit. It has all its blocks before, and the offset wraps, as the
// segments of a log are preallocated and used again.
const groupCommitBytesMax = 16 << 20

// groupCommit is the least that durable answers can cost: each write appends the bytes of its record to a group, and one pwrite and
// one fdatasync make a whole group durable. The next group forms during the sync of the last.
type groupCommit struct {
	file    int
	offset  int64      // of the next pwrite; owned by the leader that holds syncing
	syncing sync.Mutex // held during pwrite and fdatasync; taken before mu

	mu      sync.Mutex
	forming *group // takes records; its first writer will be its leader
	pooled  []byte // the buffer of an earlier group
}

// group are the records of one sync.
type group struct {
	records []byte
	done    chan struct{} // closed after the sync
	err     error         // of the sync; read after done
}

func openGroupCommit(dir string) (*groupCommit, error) {
	file, err := unix.Open(filepath.Join(dir, "group.log"), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	zeros := make([]byte, 1<<20)
	for offset := int64(0); offset < groupCommitBytesMax; offset += int64(len(zeros)) {
		if _, err := unix.Pwrite(file, zeros, offset); err != nil {
			return nil, errors.Join(err, unix.Close(file))
		}
	}
	if err := unix.Fsync(file); err != nil {
		return nil, errors.Join(err, unix.Close(file))
	}
	return &groupCommit{file: file}, nil
}

func (c *groupCommit) close() error { return unix.Close(c.file) }

// commit returns when a record of so many bytes is durable.
func (c *groupCommit) commit(ctx context.Context, size int) error {
	c.mu.Lock()
	g := c.forming
	leads := g == nil
	if leads {
		g = &group{records: c.pooled[:0], done: make(chan struct{})}
		c.forming, c.pooled = g, nil
	}
	g.records = appendZeros(g.records, size)
	c.mu.Unlock()
	if leads {
		c.lead(g)
		return g.err
	}
	select {
	case <-g.done:
		return g.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

var zeroRecord [4096]byte

func appendZeros(b []byte, size int) []byte {
	for size > 0 {
		n := min(size, len(zeroRecord))
		b, size = append(b, zeroRecord[:n]...), size-n
	}
	return b
}

// lead makes the group durable after the one before.
func (c *groupCommit) lead(g *group) {
	c.syncing.Lock()
	c.mu.Lock()
	c.forming = nil
	c.mu.Unlock()
	g.err = c.write(g.records)
	c.mu.Lock()
	c.pooled = g.records
	c.mu.Unlock()
	c.syncing.Unlock()
	close(g.done)
}

func (c *groupCommit) write(records []byte) error {
	if c.offset+int64(len(records)) > groupCommitBytesMax {
		c.offset = 0
	}
	if _, err := unix.Pwrite(c.file, records, c.offset); err != nil {
		return err
	}
	c.offset += int64(len(records))
	return unix.Fdatasync(c.file)
}

// echoWithSync is echo whose writes are answered after a shared sync of as many bytes as the store's log would have.
type echoWithSync struct {
	*echo
	log *groupCommit
}

// Put implements KV.
func (e echoWithSync) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	if err := e.log.commit(ctx, recordOverhead+operationOverhead+len(r.Key)+len(r.Value)); err != nil {
		return nil, err
	}
	return e.echo.Put(ctx, r)
}

// BatchWrite implements KV.
func (e echoWithSync) BatchWrite(ctx context.Context, r *pb.BatchWriteRequest) (*pb.BatchWriteResponse, error) {
	size := recordOverhead
	for _, m := range r.Mutations {
		size += operationOverhead + len(m.Key) + len(m.Value)
	}
	if err := e.log.commit(ctx, size); err != nil {
		return nil, err
	}
	return e.echo.BatchWrite(ctx, r)
}

// syncedTransactions is echoTransactions whose plans wait as the puts of echoWithSync do.
type syncedTransactions struct {
	echoTransactions
	log *groupCommit
}

// Execute implements Transactions.
func (t syncedTransactions) Execute(ctx context.Context, r *pb.ExecuteRequest) (*pb.ExecuteResponse, error) {
	size := recordOverhead
	for _, o := range r.ThenOperations {
		size += operationOverhead + len(o.GetWrite().GetKey()) + len(o.GetWrite().GetValue())
	}
	if err := t.log.commit(ctx, size); err != nil {
		return nil, err
	}
	return t.echoTransactions.Execute(ctx, r)
}

// serveSyncedEcho is ServeEcho with durable writes, whose log is in dir. Pipelines are answered at once.
func serveSyncedEcho(ctx context.Context, listener net.Listener, dir string) (err error) {
	log, err := openGroupCommit(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.close()) }()
	return serve(ctx, listener, echoWithSync{newEcho(), log}, syncedTransactions{log: log})
}
