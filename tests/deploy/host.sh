#!/usr/bin/env bash
# What runs inside a host's namespaces, as its first process: NAME FOLDER PYTHON CGROUPS SHOWN... Ends with systemd, if
# CGROUPS is not empty, else with sshd. PYTHON: an interpreter that all may run there.
set -euo pipefail
name=$1 folder=$2 python=$3 cgroups=$4
shift 4
hostname "$name"
mount --make-rprivate /
root=$folder/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
if test -n "$cgroups"; then
    mount -t sysfs sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
    mount --rbind /sys "$root/sys"
fi
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
mkdir -p "$root/home/ops/.ssh"
# Whom operators log in as: a user without privileges, with a home folder that is empty at first.
user=23456
if ! grep -q '^ops:' "$root/etc/passwd"; then
    echo "ops:x:$user:$user::/home/ops:/bin/bash" >> "$root/etc/passwd"
    echo "ops:x:$user:" >> "$root/etc/group"
    echo 'ops:*:19000:0:99999:7:::' >> "$root/etc/shadow"
fi
for each in "$(readlink -f "$python")" "$python"; do # whose folders may be another user's own
    while each=$(dirname "$each") && test "$each" != /; do
        # What is shown cannot be changed, and need not be where all may read it.
        mode=$(stat -c %a "$root$each" 2> /dev/null) || continue
        (((0$mode & 5) == 5)) || chmod o+rx "$root$each"
    done
done
cp "$folder/authorized_keys" "$root/home/ops/.ssh/authorized_keys"
chmod 700 "$root/home/ops/.ssh"
chown -R $user:$user "$root/home/ops"
test -f "$folder/host_key" || ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
cp "$folder/host_key" "$root/etc/rehearsal_key"
cp "$folder/hosts" "$root/etc/hosts"
cat > "$root/etc/rehearsal_sshd" <<CONFIG
HostKey /etc/rehearsal_key
PermitRootLogin prohibit-password
AuthorizedKeysFile /home/ops/.ssh/authorized_keys
StrictModes no
UsePAM $(test -n "$cgroups" && echo yes || echo no)
Subsystem sftp internal-sftp
CONFIG
sshd="/usr/sbin/sshd -D -e -f /etc/rehearsal_sshd"
clean=(env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
mkdir -p "$root/run/sshd"
test -n "$cgroups" || exec "${clean[@]}" chroot "$root" $sshd
echo "$name" > "$root/etc/hostname"
# Of this machine's services, those that logins need.
cat > "$root/etc/systemd/system/rehearsal.service" <<UNIT
[Service]
ExecStart=$sshd
RuntimeDirectory=sshd
UNIT
cat > "$root/etc/systemd/system/rehearsal.target" <<UNIT
[Unit]
Requires=rehearsal.service dbus.service systemd-logind.service systemd-user-sessions.service
UNIT
# Devices are this machine's: udev, where it is installed, would give all hosts one hardware address.
for unit in d.service d-control.socket d-kernel.socket -trigger.service; do
    ln -sf /dev/null "$root/etc/systemd/system/systemd-udev$unit"
done
exec "${clean[@]}" container=lxc chroot "$root" /lib/systemd/systemd --unit=rehearsal.target
