#!/usr/bin/env bash
# What runs inside a host's namespaces, as its first process: NAME FOLDER SHOWN... Ends with sshd.
set -euo pipefail
name=$1 folder=$2
shift 2
hostname "$name"
mount --make-rprivate /
root=$folder/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs dev "$root/dev" -o mode=755
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=0666,mode=0620
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs shm "$root/dev/shm" -o size=2g,mode=1777
mount -t tmpfs run "$root/run"
mkdir -p "$folder/tmp"
rm -rf "${folder:?}"/tmp/*
chmod 1777 "$folder/tmp"
mount --bind "$folder/tmp" "$root/tmp"
for shown in "$@"; do # what lies below /tmp here
    mkdir -p "$root$shown"
    mount --bind "$shown" "$root$shown"
    mount -o remount,bind,ro "$root$shown"
done
mkdir -p "$root/run/sshd" "$root/home/ops/.ssh"
# Whom operators log in as: root by another name, with a home folder that is empty at first. The first name of an id is
# the one whose home folder programs look for.
grep -q '^ops:' "$root/etc/passwd" || sed -i '1i ops:x:0:0::/home/ops:/bin/bash' "$root/etc/passwd"
grep -q '^ops:' "$root/etc/shadow" || echo 'ops:*:19000:0:99999:7:::' >> "$root/etc/shadow"
cp "$folder/authorized_keys" "$root/home/ops/.ssh/authorized_keys"
chmod 700 "$root/home/ops/.ssh"
test -f "$folder/host_key" || ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
cp "$folder/host_key" "$root/run/sshd/host_key"
cat > "$root/run/sshd/config" <<CONFIG
HostKey /run/sshd/host_key
PermitRootLogin prohibit-password
AuthorizedKeysFile /home/ops/.ssh/authorized_keys
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
CONFIG
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" /usr/sbin/sshd -D -e -f /run/sshd/config
